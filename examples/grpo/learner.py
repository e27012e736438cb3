"""The trainer's side: a model with the engine's bf16 weights, and fp32 masters behind them."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from replay import PackedBatch, Policy, score_full, score_support


class Learner:
    """Scores with the weights as they are saved, so that both sides have the same model.

    It computes in fp32, so that the engine's rounding is all that is left between them. AdamW works
    on fp32 copies of the weights: its steps are smaller than what a bf16 number can change by.
    """

    def __init__(self, path: str, learning_rate: float, device: str) -> None:
        self._path = path
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
        self.policy = Policy.of(self._model.eval(), name=path)
        self._masters = [p.detach().clone() for p in self._model.parameters()]
        self._adam = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=0.0)
        self._round()

    def hidden(self, batch: PackedBatch) -> Tensor:
        """[T, D] What predicts each target."""
        return self.policy.forward(batch.input_ids, batch.position_ids)[batch.hidden_rows]

    def logprobs(
        self, hidden: Tensor, batch: PackedBatch, *, over_supports: bool
    ) -> tuple[Tensor, Tensor]:
        """[T], [T] Logprob of each target and entropy: over its recorded support, or over all."""
        args, t = (hidden, self.policy.weight, batch.targets), batch.temperature
        if not over_supports:
            return score_full(*args, temperature=t)[:2]
        return score_support(*args, batch.support_ids, batch.support_offsets, temperature=t)[:2]

    def step(self, loss: Tensor) -> None:
        loss.backward()
        for master, weight in zip(self._masters, self._model.parameters(), strict=True):
            master.grad, weight.grad = weight.grad, None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for master, weight in zip(self._masters, self._model.parameters(), strict=True):
            weight.copy_(master.bfloat16())

    def save(self, folder: Path) -> Path:
        """A checkpoint that the server can load: the weights beside config and tokenizer."""
        if not folder.exists():
            shutil.copytree(self._path, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        weights = {name: w.bfloat16() for name, w in self._model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder.resolve()

    def suspend(self, path: Path, step: int) -> None:
        torch.save({"step": step, "masters": self._masters, "adam": self._adam.state_dict()}, path)

    def resume(self, path: Path) -> int:
        """The step that `suspend` was told."""
        state = torch.load(path, weights_only=True)
        for mine, saved in zip(self._masters, state["masters"], strict=True):
            mine.copy_(saved)
        self._adam.load_state_dict(state["adam"])
        self._round()
        return int(state["step"])
