"""The draft itself: ModelOpt's Eagle-3 module with what surrounds it, as one Megatron module.

ModelOpt offers its module as a part of a converted GPTModel that computes a loss of its own. Here it stands beside the
policy, which stays as it is: the trainer hands it what was caught in the policy's forward pass, and gets logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from modelopt.torch.speculative.plugins.megatron_eagle import EagleModule, dict_to_config

from megasetup.model.draft.architecture import DraftArchitecture


class DraftOutput(NamedTuple):
    """What a draft computes.

    Attributes:
        logits: [sequence, batch, tokens of the draft / tensor-parallel size], in the draft's dtype.
        hidden_states: [sequence, batch, hidden size], without a gradient: what a second step reads (`projected=True`).
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor


class EagleDraft(MegatronModule):  # type: ignore[misc]
    """An Eagle-3 draft of a policy.

    Attributes:
        architecture: its sizes.
        eagle: ModelOpt's module.
        names: what each tensor is called in the files that the draft was loaded from, by the name that
            `megasetup.model.draft.layout` gives it; empty without files.
    """

    def __init__(self, architecture: DraftArchitecture, policy: Any, vocab_rows: int, max_sequence_length: int) -> None:
        """Build it, with weights as initialised.

        Args:
            architecture: its sizes.
            policy: the policy's TransformerConfig: dtypes, sequence parallelism, where weights are initialised.
            vocab_rows: the rows of the policy's output layer on all ranks together, padding included.
            max_sequence_length: the policy's.

        Raises:
            ImportError: Transformer Engine, whose layers ModelOpt builds the module of, is not installed.
        """
        config = _config_of(architecture, policy)
        config.vocab_size, config.max_sequence_length = vocab_rows, max_sequence_length
        whole = architecture.draft_vocab_size == architecture.vocab_size
        config.draft_vocab_size = vocab_rows if whole else architecture.draft_vocab_size
        super().__init__(config)
        self.architecture = architecture
        self.names: dict[str, str] = {}
        rotary = RotaryEmbedding(
            kv_channels=architecture.kv_channels,
            rotary_percent=1.0,
            rotary_base=architecture.rotary_base,
            rope_scaling=architecture.rope_factor is not None,
            rope_scaling_factor=architecture.rope_factor or 8.0,
            use_cpu_initialization=config.use_cpu_initialization,
        )
        self.eagle = EagleModule(config, rotary)
        self._initialise_projection()

    def _initialise_projection(self) -> None:
        # ModelOpt leaves this one as the allocator gave it. Its copies on all ranks must be the same.
        weight = self.eagle.fc.weight
        values = torch.empty(weight.shape)
        values.normal_(std=self.architecture.init_method_std, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            weight.copy_(values)

    @property
    def head_rows(self) -> int:
        """The rows of the LM head on all ranks together, padding included."""
        rows: int = self.eagle.config.draft_vocab_size
        return rows

    def policy_tokens(self) -> torch.Tensor:
        """The policy's token for each row of the LM head: [head_rows], int64."""
        own = torch.arange(self.head_rows, device=self.eagle.fc.weight.device)
        return own + self.eagle.d2t if hasattr(self.eagle, "d2t") else own

    def forward(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        *,
        projected: bool = False,
    ) -> DraftOutput:
        """Propose a token after the next one, for each position.

        Collective over the tensor-parallel ranks.

        Args:
            hidden_states: [sequence, batch, auxiliary layers x hidden size], the policy's, whole sequences.
            embeddings: [sequence, batch, hidden size], of the token after each position.
            attention_mask: [batch or 1, 1, sequence, sequence], bool, True where a position must not look; None for
                causal attention, which needs no memory for a mask.
            packed_seq_params: Megatron's, for several sequences in a row.
            projected: whether hidden_states are an earlier call's, [sequence, batch, hidden size].
        """
        for layer in self.eagle.decoder.layers:
            layer.self_attention.attn_mask_type = (
                AttnMaskType.arbitrary if attention_mask is not None else AttnMaskType.causal
            )
        # (the policy's are FP32 where it keeps its residuals so)
        dtype = self.eagle.fc.weight.dtype
        hidden_states, embeddings = hidden_states.to(dtype), embeddings.to(dtype)
        scattered = self.config.sequence_parallel
        if scattered:
            hidden_states = scatter_to_sequence_parallel_region(hidden_states)
            embeddings = scatter_to_sequence_parallel_region(embeddings)
        if not projected:
            hidden_states, _ = self.eagle.fc(hidden_states)
        hidden_states, following = self.eagle(
            embeddings, hidden_states, attention_mask, packed_seq_params=packed_seq_params
        )
        logits, _ = self.eagle.eagle_output_layer(hidden_states)
        if scattered:
            following = gather_from_sequence_parallel_region(following)
        return DraftOutput(logits, following)


def _config_of(draft: DraftArchitecture, policy: Any) -> Any:
    """ModelOpt's configuration of its module."""
    config = dict_to_config(
        {
            "torch_dtype": str(policy.params_dtype).removeprefix("torch."),
            "position_embedding_type": "rope",
            "rope_theta": draft.rotary_base,
            "rope_scaling": {} if draft.rope_factor is None else {"factor": draft.rope_factor},
            "num_hidden_layers": draft.num_layers,
            "intermediate_size": draft.ffn_hidden_size,
            "num_attention_heads": draft.num_attention_heads,
            "num_key_value_heads": draft.num_query_groups,
            "head_dim": draft.kv_channels,
            "initializer_range": draft.init_method_std,
            "rms_norm_eps": draft.layernorm_epsilon,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(draft.aux_layers),
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
            "has_lm_head": True,
        },
        use_cpu_initialization=policy.use_cpu_initialization,
        fp16=policy.fp16,
        bf16=policy.bf16,
        sequence_parallel=policy.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1,
    )
    config.hidden_size = draft.hidden_size
    return config
