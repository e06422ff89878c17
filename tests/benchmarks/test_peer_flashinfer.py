"""The peers of the attention kernels, without a GPU: their shapes, their lines and how long they are timed."""

import itertools
import sys

import pytest
from ops import mla_decode, mla_prefill, timing

torch = pytest.importorskip("torch")
peer = pytest.importorskip("peer_flashinfer")


def test_peers_are_timed_on_our_shapes_over_as_many_bytes():
    assert set(itertools.product(peer.BATCHES, peer.HEADS, peer.HELD)) == set(mla_decode.BARS)
    assert (peer.RANK, peer.ROPE, peer.PAGE, peer.SCALE) == (mla_decode.RANK, mla_decode.ROPE, mla_decode.PAGE, mla_decode.SCALE)
    ours = {shape[:6] for shape in mla_prefill.SHAPES if shape[:2] == (1, peer.PROMPT_HEADS) and shape[2] == shape[3]}
    assert ours == {(1, peer.PROMPT_HEADS, tokens, tokens, peer.WIDTH, peer.VALUE) for tokens in peer.PROMPTS}
    for nbytes in (1 << 20, 5 << 20, 100 << 20, 1 << 30):
        assert peer.sets_of(nbytes) == timing.sets_of(nbytes)


@pytest.mark.parametrize(("rough", "steady"), [(1e-3, 1e-3), (2e-2, 1e-3), (1e-3, 2e-3), (0.4, 0.4)])
def test_launches_are_timed_together_for_a_quarter_of_a_second_after_two_that_are_not_counted(rough, steady):
    runs = []

    def elapsed(launch, times):
        runs.append(times)
        return times * (rough if len(runs) <= 2 else steady)

    assert peer.seconds(None, elapsed) == steady
    assert runs[:2] == [1, 1]
    assert steady * runs[-1] >= peer.SECONDS


def test_the_answers_in_float32_are_those_of_attention(monkeypatch):
    monkeypatch.setattr(peer, "DEVICE", "cpu")
    monkeypatch.setattr(peer, "BEYOND_L2", 1 << 20)
    q, k, v = (peer.normal(150, 2, width) for width in (peer.WIDTH, peer.WIDTH, peer.VALUE))
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*(x.transpose(0, 1).float() for x in (q, k, v)), is_causal=True, scale=peer.SCALE).transpose(0, 1)
    assert peer.error(out[-128:], peer.prompt_wanted(q, k, v)) < 1e-5
    cache = peer.Cache(2, 4, 100)
    held = cache.sets[0][cache.table.long()].flatten(1, 2)[:, :100].float()
    out = attend(cache.q.float(), held, held[..., : peer.RANK], scale=peer.SCALE)
    assert peer.error(out, cache.wanted()) < 1e-5


def test_its_lines_are_read_beside_our_kernels_and_a_peer_that_fails_or_is_wrong_leaves_out_its_own(
    kernels, monkeypatch, tmp_path, capsys
):
    def decode(backend, batch, heads, held):
        if batch == 1:
            raise RuntimeError("not\nhere")
        return held / 100, 0.002 if heads == 16 else float("nan")

    def prefill(make, tokens):
        return (tokens / (2 if make.keywords["padded"] else 1), 0.002) if hasattr(make, "keywords") else (tokens / 4, 0.002)

    monkeypatch.setattr(peer, "decode", decode)
    monkeypatch.setattr(peer, "prefill", prefill)
    path = tmp_path / "peers.jsonl"
    monkeypatch.setattr(sys, "argv", ["peer_flashinfer.py", "--fa2", "--out", str(path)])
    peer.main()
    assert capsys.readouterr().out == path.read_text()
    found = kernels.peers(path)
    decoded = itertools.product((64, 128), (16,), peer.HELD)
    wanted = {("mla_decode", *shape): dict.fromkeys(("flashinfer-fa3", "flashinfer-fa2"), shape[2] / 100) for shape in decoded}
    wanted |= {("mla_prefill", 1, 128, n): {"flashinfer-fa3": n / 4, "cudnn": n / 2} for n in peer.PROMPTS}
    assert found == wanted
    assert '"failed": "RuntimeError: not here"' in path.read_text()
    assert '"failed": "its error is nan"' in path.read_text()
