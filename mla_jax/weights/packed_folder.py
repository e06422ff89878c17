"""A folder that keeps packed experts, a file per layer, for the next start to map."""

import json
from pathlib import Path
from typing import Any

from mla_jax.base.errors import BadFile, BadRequest, printable
from mla_jax.base.files import read_json, write_json
from mla_jax.offload.pack import map_packed
from mla_jax.weights.orbax_manifest import MAX_MANIFEST
from mla_jax.weights.orbax_store import writing

PACKED_MANIFEST = "packed_experts.json"


class PackedFolder:
    """Raises BadFile for a folder made of something else than `made_of` says, BadRequest where there can be no folder."""

    def __init__(self, path: Path, made_of: dict[str, Any]):
        self.path = path
        if not self._made(made_of):
            raise BadFile(f"{path} is no folder of packed experts", "choose another folder, or an empty one")
        found = read_json(path / PACKED_MANIFEST, MAX_MANIFEST)
        expected = json.loads(json.dumps(made_of))
        if differing := [key for key in {**found, **expected} if found.get(key) != expected.get(key)]:
            what = "what differs: " + ", ".join(map(printable, differing))
            raise BadFile(
                f"{path} keeps packed experts of something else", what, "choose another folder, or delete it"
            )

    def mapped(self, layer: int) -> Any | None:
        """The `cpu_experts.Experts` of a layer, None where there is no file."""
        file = self._file(layer)
        return map_packed(file) if file.exists() else None

    def keep(self, layer: int, experts: Any) -> Any:
        """Saves a layer's `experts` and returns them mapped from the file."""
        file = self._file(layer)
        with writing(file, "layers saved before"), experts:
            experts.save(file)
        return map_packed(file)

    def _made(self, made_of: dict[str, Any]) -> bool:
        """Whether the folder has a manifest, which an empty or a new one gets."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not any(self.path.iterdir()):
                write_json(self.path / PACKED_MANIFEST, made_of)
            return (self.path / PACKED_MANIFEST).exists()
        except (OSError, ValueError) as e:
            reason = printable(getattr(e, "strerror", None) or str(e))
            what = "expected a folder that can be read, or made and written"
            raise BadRequest(
                f"{self.path} cannot keep packed experts: {reason}", what, "choose another host_folder"
            ) from e

    def _file(self, layer: int) -> Path:
        return self.path / f"layer_{layer:03d}.experts"
