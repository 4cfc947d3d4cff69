"""A plain PyTorch trainer as a baseline: a straightforward trainer from PyTorch's best building blocks.

LLaMA in float32 under autocast, compiled; SDPA for whole sequences, FlexAttention with a block mask for packed
documents (on CPUs, where FlexAttention has no backward pass, SDPA with a dense mask); fused AdamW. No activations are
recomputed, unless `recompute` checkpoints every layer. Parameters have their Hugging Face names.
"""

import functools
import pathlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from striped_attention.models.config import ModelConfig


class Norm(nn.Module):
    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(dim)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, linear = config.head_dim, functools.partial(nn.Linear, bias=False)
        self.config = config
        self.q_proj = linear(config.dim, config.heads * width)
        self.k_proj, self.v_proj = (linear(config.dim, config.kv_heads * width) for _ in range(2))
        self.o_proj = linear(config.heads * width, config.dim)

    def forward(self, x: torch.Tensor, angles: Any, mask: Any) -> torch.Tensor:
        split = lambda y: y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        q, k = rotate(q, *angles), rotate(k, *angles)
        grouped = self.config.heads != self.config.kv_heads
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        elif isinstance(mask, torch.Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        else:
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.dim, config.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.dim, config.norm_epsilon) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, x: torch.Tensor, angles: Any, mask: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: ModelConfig, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.dim, config.norm_epsilon)

    def forward(self, tokens: torch.Tensor, angles: Any, mask: Any) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            x = checkpoint(layer, x, angles, mask, use_reentrant=False) if self.recompute else layer(x, angles, mask)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig, recompute: bool) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config, recompute)
        self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, mask: Any) -> torch.Tensor:
        frequency = self.config.rope_theta ** -(
            torch.arange(0, self.config.head_dim, 2, device=tokens.device) / self.config.head_dim
        )
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        scores = self.lm_head(self.model(tokens, (angle.cos(), angle.sin()), mask))
        losses = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Trainer:
    """A model with its optimiser. `rates` are the learning rates of all steps."""

    def __init__(
        self, config: ModelConfig, weights: pathlib.Path, rates: list[float], bfloat16: bool, recompute: bool = False
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = False
        model = Llama(config, recompute)
        state: dict[str, torch.Tensor] = {}
        for path in sorted(weights.glob("*.safetensors")):
            state |= load_file(path)
        model.load_state_dict(state)
        self.model = model.to(self.device)
        self.rates, self.bfloat16, self.done = rates, bfloat16, 0
        matrices = [p for name, p in model.named_parameters() if not name.endswith("norm.weight")]
        others = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rates[0], betas=(0.9, 0.95), eps=1e-8, fused=True)
        cuda = self.device == "cuda"
        self.forward: Any = torch.compile(self.model) if cuda else self.model
        self.block_mask: Any = torch.compile(create_block_mask) if cuda else create_block_mask

    def mask(self, segments: torch.Tensor | None) -> Any:
        """Make the mask of packed documents; None for whole sequences."""
        if segments is None:
            return None
        length = segments.shape[1]
        if self.device == "cpu":
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]

        def visible(b: Any, _: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (segments[b, q] == segments[b, k])

        return self.block_mask(visible, segments.shape[0], None, length, length, device=self.device)

    def step(self, batch: tuple[np.ndarray, ...], documents: bool) -> float:
        """Train on tokens, targets, loss weights and segments; return the loss before the update."""
        tokens, targets, weights, segments = (torch.from_numpy(np.asarray(x)).to(self.device) for x in batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[self.done]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
            mask = self.mask(segments if documents else None)
            loss = self.forward(tokens.long(), targets.long(), weights, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss.detach())
