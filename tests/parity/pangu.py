"""openPangu-Ultra-MoE, which transformers has no class for, out of the parts of its DeepSeek-V3: only where norms stand is new.

Written after the model's published code (modeling_openpangu_moe.py): norms around attention and MLP, and a router of V3's kind in
one group without a bias, which is here a bias of zeros."""

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm


class PanguLayer(DeepseekV3DecoderLayer):
    """A layer whose attention and MLP are normed on both sides."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.pre_mlp_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_mlp_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if hasattr(self.mlp, "gate"):  # whose bias no file holds
            del self.mlp.gate.e_score_correction_bias
            self.mlp.gate.e_score_correction_bias = 0.0

    def forward(self, hidden_states, **settings):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **settings)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(hidden_states)))


class PanguForCausalLM(DeepseekV3ForCausalLM):
    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        for i in range(len(self.model.layers)):
            self.model.layers[i] = PanguLayer(config, i)
