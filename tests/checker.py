"""beartype as the tests use it: an int may stand for a float, as in PEP 484."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
