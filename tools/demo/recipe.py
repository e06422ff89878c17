"""The demo model's config and training settings."""

from dataclasses import dataclass, field

from demo.corpus import ASSISTANT, USER
from demo.tasks import TASKS
from mla_jax import Config

VOCABULARY = 4096

MODEL = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '" + USER + "' + message.content }}"
    "{% elif message.role == 'assistant' %}{{ '" + ASSISTANT + "' + message.content + eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Phase:
    steps: int
    rows: int
    length: int
    mix: dict[str, float]  # kind of row -> relative frequency


@dataclass(frozen=True)
class Recipe:
    """Every setting of a training run; the seed fixes the rest."""

    model: dict = field(default_factory=lambda: dict(MODEL))
    steps: int = 7_600
    extended: float = 0.15  # share of the steps in the second phase
    tokens: int = 32_768  # per step
    length: int = 2048  # of a row in the first phase
    extended_length: int = 8192  # and in the second
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    drop: float = 0.1  # share of the weights that each step drops at random
    mtp_weight: float = 0.3
    answer_weight: float = 4.0
    bias_step: float = 5e-3  # first step of a router's bias towards balance; decays linearly to zero
    seed: int = 0

    @property
    def phases(self) -> tuple[Phase, Phase]:
        second = round(self.steps * self.extended)
        usual = {"code": 0.5, "functions": 0.2, "loops": 0.08, "chat": 0.05}
        near, far = dict.fromkeys(TASKS, 0.05), dict.fromkeys(TASKS, 0.1)
        return (
            Phase(self.steps - second, self.tokens // self.length, self.length, usual | near),
            Phase(second, self.tokens // self.extended_length, self.extended_length, usual | far),
        )

    def config(self, extended: bool) -> Config:
        """The model before or after its context is extended."""
        if not extended:
            return Config.from_hf({**self.model, "max_position_embeddings": self.length})
        yarn = YARN | {
            "factor": self.extended_length / self.length,
            "original_max_position_embeddings": self.length,
        }
        return Config.from_hf(
            {**self.model, "max_position_embeddings": self.extended_length, "rope_scaling": yarn}
        )
