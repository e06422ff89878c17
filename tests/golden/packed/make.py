"""Writes the folders of packed weights: tiny models whose weights other tools' code packs or unpacks, and what they make of them.

    python tests/golden/packed/make.py

needs compressed-tensors 0.20, auto-round 0.16, torch and transformers. Of each packed weight a digest is stored of its numbers
in the dtype that the tool gives; the logits are those of transformers for the same numbers in float32."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import models  # noqa: E402
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter  # noqa: E402
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402
from parity import oracle  # noqa: E402

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor, torch.Tensor]  # a layer's tensors; its weight in the tool's dtype, and in float32
IGNORED = ["lm_head", "re:.*mlp\\.gate$"]
random = torch.Generator().manual_seed(0)


def sizes(unit: int, **changes) -> dict:
    """A model whose matrices all have `unit` columns, and rows in multiples of 8 or, with a wide rope, of 32."""
    same = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4}
    routed = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": unit // 2}
    return models.FAMILIES["v3"] | dict.fromkeys(same, unit) | few | routed | heads | changes


# ---- compressed-tensors


def compressed(format: str, weights: dict, dtype: torch.dtype, targets: list[str], dynamic_inputs: bool = False) -> dict:
    """The settings as the library writes them."""
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True) if dynamic_inputs else None
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=targets, weights=args, input_activations=inputs, format=format)
    found = QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status="compressed", ignore=IGNORED)
    return {"settings": json.loads(found.model_dump_json()), "pack": lambda w: _compress(format, w.to(dtype), scheme)}


def _compress(format: str, weight: torch.Tensor, scheme: QuantizationScheme) -> Packed:
    args, tool = scheme.weights, BaseCompressor.get_value_from_registry(format)
    state = {"weight": weight, **_scales(weight, args)}
    stored = {k: v.contiguous() for k, v in tool.compress(state, scheme).items()}
    if "fp4" in format:
        return stored, tool.decompress(dict(stored), scheme)["weight"], _fp4(stored, tool, args)
    wide = {k: v.float() if k == "weight_scale" else v for k, v in stored.items()}
    return stored, *(tool.decompress(dict(one), scheme)["weight"] for one in (stored, wide))


def _scales(w: torch.Tensor, args: QuantizationArgs) -> Tensors:
    rows, columns = w.shape
    strategy, top = args.strategy, {"int": 7.5, "float": 448.0 if args.num_bits == 8 else 6.0}[args.type]
    blocks = {"group": (1, args.group_size), "tensor_group": (1, 16), "channel": (1, columns), "tensor": (rows, columns)}
    size = blocks.get(strategy) or tuple(args.block_structure)
    padded = torch.nn.functional.pad(w.float(), (0, -columns % size[1], 0, -rows % size[0]))
    tiles = padded.unfold(0, size[0], size[0]).unfold(1, size[1], size[1])
    most, least = tiles.amax((2, 3)), tiles.amin((2, 3))
    if not args.symmetric:
        scale = ((most - least) / 15).to(w.dtype)
        zero = torch.clamp(torch.round(-8 - least / scale.float()), -8, 7).to(torch.int8)
        return {"weight_scale": scale, "weight_zero_point": zero}
    scale = torch.maximum(most, -least) / top
    if strategy == "tensor_group":
        number = 448.0 * 6.0 / w.float().abs().max().reshape(1)
        return {"weight_scale": (scale * number).to(torch.float8_e4m3fn).to(w.dtype), "weight_global_scale": number}
    if args.num_bits == 4 and args.type == "float":
        return {"weight_scale": torch.exp2(torch.ceil(torch.log2(scale))).to(w.dtype)}
    if args.num_bits == 4:
        scale = _short(scale, 4)
    return {"weight_scale": (scale.reshape(1) if strategy == "tensor" else scale).to(w.dtype)}


def _fp4(stored: Tensors, tool: type, args: QuantizationArgs) -> torch.Tensor:
    rows, half = stored["weight_packed"].shape
    codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, torch.float32)
    scale = tool._decompress_scale(stored["weight_scale"], torch.float32)
    return dequantize(codes, scale, args=args, dtype=torch.float32, global_scale=stored.get("weight_global_scale"))


# ---- others


def awq(group: int) -> dict:
    """Words at random are codes as good as any; compressed-tensors' converter reads them."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    converter = AutoAWQConverter(group_size=group)
    scheme = converter._build_quant_config().config_groups["config_group_0"]

    def pack(w: torch.Tensor) -> Packed:
        groups, words = w.shape[1] // group, (w.shape[0] // 8,)
        scales = (0.2 + torch.rand((groups, w.shape[0]), generator=random)) * w.std() / 6
        stored = {"qweight": _words(w.shape[1], *words), "qzeros": _words(groups, *words), "scales": scales.half()}
        (read,) = [converter.process({f"m.{name}": t for name, t in stored.items()})]
        state = {name.removeprefix("m."): t for name, t in read.items()}
        tool = BaseCompressor.get_value_from_registry("pack-quantized")
        wide = state | {"weight_scale": state["weight_scale"].float()}
        return stored, *(tool.decompress(dict(one), scheme)["weight"] for one in (state, wide))

    return {"settings": settings | {"modules_to_not_convert": ["lm_head", "mlp.gate."]}, "pack": pack}


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=random, dtype=torch.int64).to(torch.int32)


def gptq(version: str, group: int) -> dict:
    """auto-round's two linear layers, one of which stores zero points less one."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    tool = {"gptq": qlinear_torch_zp, "gptq_v2": qlinear_torch}[version].QuantLinear
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}

    def pack(w: torch.Tensor) -> Packed:
        layer, linear = tool(4, group, w.shape[1], w.shape[0], bias=False), torch.nn.Linear(*w.shape[::-1], bias=False)
        linear.weight.data, layer.device = w.clone(), "cpu"
        groups = w.reshape(w.shape[0], -1, group)
        scales = _short((groups.amax(-1) - groups.amin(-1)) / 15, 6)
        zeros = torch.clamp(torch.round(-groups.amin(-1) / scales), 1, 15)
        layer.pack(linear, scales, zeros, None, device="cpu")
        stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
        unpacked = layer(torch.eye(w.shape[1], dtype=torch.float16)).T.contiguous()
        g_idx = torch.arange(w.shape[1], dtype=torch.int32) // group
        return stored | {"g_idx": g_idx}, unpacked, unpacked.float()

    return {"settings": settings | {"checkpoint_format": version}, "pack": pack}


def _short(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Of so few bits that products with codes are exact in the 16 bits that a tool computes in."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


def modelopt() -> dict:
    """By the rules of its files; compressed-tensors' converter reads them."""
    whole = compressed("nvfp4-pack-quantized", NVFP4, torch.bfloat16, ["Linear"])
    converter = ModelOptNvfp4Converter(targets=["re:.*"])
    args = QuantizationArgs(**NVFP4)

    def pack(w: torch.Tensor) -> Packed:
        stored, _, _ = whole["pack"](w)
        factor = 2.0 ** torch.round(torch.log2(1 / stored["weight_global_scale"][0]))  # whose inverse is exact
        found = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], "weight_scale_2": factor}
        found["input_scale"] = torch.tensor(0.5)
        read = converter.process({f"m.{name}": t for name, t in found.items()})
        state = {name.removeprefix("m."): t for name, t in read.items()}
        state["weight_global_scale"] = state["weight_global_scale"].reshape(1)
        tool = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        return found, tool.decompress(dict(state), scheme)["weight"], _fp4(state, tool, args)

    return {"settings": None, "pack": pack}


# ---- folders


INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False}
NVFP4 |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
MXFP4 |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
BF16, F16, F32, ALL = torch.bfloat16, torch.float16, torch.float32, ["Linear"]
EXPERTS = ["re:.*mlp\\.experts\\..*"]
WIDE = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
ODD = {"moe_intermediate_size": 36, "v_head_dim": 18}

FOLDERS: dict[str, Callable[[], tuple[dict, dict]]] = {
    "int4_g32": lambda: (sizes(32), compressed("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}, BF16, EXPERTS)),
    "int4_g128": lambda: (sizes(128), compressed("pack-quantized", INT4 | {"strategy": "group", "group_size": 128}, BF16, ALL)),
    "int4_channel": lambda: (sizes(64, **ODD), compressed("pack-quantized", INT4 | {"strategy": "channel"}, BF16, ALL)),
    "int4_zeros": lambda: (
        sizes(64),
        compressed("pack-quantized", INT4 | {"symmetric": False, "strategy": "group", "group_size": 64}, F16, ALL),
    ),
    "fp8_channel": lambda: (sizes(32), compressed("float-quantized", FP8 | {"strategy": "channel"}, BF16, ALL, True)),
    "fp8_tensor": lambda: (sizes(32), compressed("float-quantized", FP8 | {"strategy": "tensor"}, BF16, ALL, True)),
    "fp8_blocks": lambda: (
        sizes(32),
        compressed("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 16]}, F32, ALL, True),
    ),
    "awq": lambda: (sizes(64), awq(64)),
    "gptq": lambda: (sizes(32, **WIDE), gptq("gptq", 32)),
    "gptq_v2": lambda: (sizes(32, **WIDE), gptq("gptq_v2", 32)),
    "nvfp4": lambda: (sizes(32), modelopt()),
    "nvfp4_compressed": lambda: (sizes(32), compressed("nvfp4-pack-quantized", NVFP4, BF16, ALL)),
    "mxfp4": lambda: (sizes(32), compressed("mxfp4-pack-quantized", MXFP4, BF16, ALL)),
}

OPENED = ("int4_g128", "int4_channel", "mxfp4")  # by transformers, which fails for others or quantises activations too


def main():
    for name in sys.argv[1:] or FOLDERS:
        hf, tool = FOLDERS[name]()
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _write(folder, hf, tool, experts_alone=name == "int4_g32")
        print(name, sum(file.stat().st_size for file in folder.iterdir()) >> 10, "KiB")


def _write(folder: Path, hf: dict, tool: dict, experts_alone: bool) -> None:
    tensors, plain, digests = {}, {}, {}
    for name, value in models.tensors(hf).items():
        module, w = name.removesuffix(".weight"), torch.from_numpy(value)
        if "_proj" not in name or (experts_alone and ".experts." not in name):
            tensors[name] = w.to(BF16)
            plain[name] = tensors[name].float().numpy()
            continue
        stored, unpacked, exact = tool["pack"](w)
        tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        plain[name] = exact.float().numpy()
        digests[name] = str(unpacked.dtype).removeprefix("torch."), _digest(unpacked), _digest(exact.float())
    settings = tool["settings"]
    if settings is None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
        given = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
        other = {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": given}
        (folder / "hf_quant_config.json").write_text(json.dumps(other, indent=1))
    else:
        hf = hf | {"quantization_config": settings}
    if experts_alone:  # as Kimi-K2.5 is released
        tensors = {"language_model." + name: tensor for name, tensor in tensors.items()}
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros((4, 3))
        hf = {"model_type": "kimi_k25", "text_config": hf | {"model_type": "kimi_k2"}, "vision_config": {"patch_size": 14}}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf, indent=1))
    (folder / "digests.json").write_text(json.dumps(digests, indent=0))
    with tempfile.TemporaryDirectory() as scratch:
        text = {k: v for k, v in hf.get("text_config", hf).items() if k != "quantization_config"}
        model = oracle.load(models.write(Path(scratch), text, plain))
        tokens = np.random.default_rng(1).integers(2, text["vocab_size"], (2, 12))
        logits = oracle.logits(model, tokens)
    if folder.name in OPENED:
        found = oracle.logits(_opened(folder, hf), tokens)
        assert np.abs(found - logits).max() < 1e-5 * logits.std(), folder.name
    np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=logits)


def _opened(folder: Path, hf: dict) -> torch.nn.Module:
    """The folder as transformers itself opens it, which unpacks in bfloat16; computed in float32."""
    config = transformers.DeepseekV3Config(**{k: v for k, v in hf.items() if k != "model_type"})
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": BF16}
    unpacks = transformers.CompressedTensorsConfig(run_compressed=False)
    tool = transformers.DeepseekV3ForCausalLM
    return tool.from_pretrained(folder, config=config, quantization_config=unpacks, **how).float().eval()


def _digest(tensor: torch.Tensor) -> str:
    """Of the bits of all numbers; a zero has no sign."""
    return hashlib.sha256((tensor + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
