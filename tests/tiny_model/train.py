"""Train the tiny language model that the unit tests load.

Makes a byte-level BPE tokenizer and a 1.8M-parameter Llama-architecture model from the
documentation topics that every CPython ships (`pydoc_data.topics`), and writes both as an
ordinary Hugging Face folder, `model/`, next to this file. Run it from anywhere:

    python tests/tiny_model/train.py

It needs torch, transformers and tokenizers, no network and no GPU, and takes some minutes on
two cores. Seeds are fixed, but the topics' text differs between Python versions and float
rounding between machines, so retraining elsewhere gives a similar model, not the same bytes.
"""

import hashlib
import platform
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.optim import lr_scheduler
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent / "model"
BOS, EOS, USER, ASSISTANT = SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
BOS_ID, EOS_ID = 0, 1  # The trainer numbers the special tokens first, in this order.
IDS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
VOCAB, SEQ, BATCH, STEPS, WARMUP, LR, SEED, THREADS = 1024, 128, 16, 800, 40, 3e-3, 0, 2
DOC_CHARS = 600  # Documents are cut at paragraph ends, this short so that eos is common.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}{{ "<|user|>" + message.content }}
{%- elif message.role == "assistant" %}{{ "<|assistant|>" + message.content + eos_token }}
{%- elif message.role == "system" and loop.first %}{{ message.content }}
{%- else %}{{ raise_exception("unsupported message role: " + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}
"""


def documents() -> tuple[list[str], list[str]]:
    """Cut the topics into documents (train, val), no paragraph being in both or there twice."""
    seen: set[str] = set()
    split: tuple[list[str], list[str]] = ([], [])
    for index, (name, text) in enumerate(sorted(topics.items())):
        paragraphs = [p for p in text.strip().split("\n\n") if p not in seen]
        seen.update(paragraphs)
        docs = [""]
        for paragraph in paragraphs:
            if docs[-1] and len(docs[-1]) + len(paragraph) > DOC_CHARS:
                docs.append("")
            docs[-1] += ("\n\n" if docs[-1] else "") + paragraph
        if docs[0]:  # One more document teaches the chat tokens.
            docs.append(f"{USER}Tell me about {name}.{ASSISTANT}{docs[0]}")
            split[index % 16 == 8].extend(docs)
    return split


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer which puts bos in front of what it encodes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((text for text in texts if not text.startswith(USER)), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All documents as one row of ids: bos document eos, bos document eos, ..."""
    return torch.tensor([id_ for text in texts for id_ in [*tokenizer.encode(text), EOS_ID]])


@torch.no_grad()
def loss_on(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Mean next-token loss, in nats, over the stream cut into windows."""
    rows = stream[: len(stream) // SEQ * SEQ].view(-1, SEQ)
    losses = [model(input_ids=r, labels=r).loss.float() * len(r) for r in torch.split(rows, 64)]
    return float(sum(losses) / len(rows))


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    train_docs, val_docs = documents()
    digest = hashlib.sha256("\0".join(train_docs + val_docs).encode()).hexdigest()[:16]
    print(f"python {platform.python_version()}, torch {torch.__version__}, corpus {digest}")
    tokenizer = train_tokenizer(train_docs)
    train, val = pack(tokenizer, train_docs), pack(tokenizer, val_docs)
    print(f"documents {len(train_docs)}/{len(val_docs)}, tokens {len(train)}/{len(val)}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **IDS,
    )
    model = LlamaForCausalLM(config)
    print(f"parameters {sum(p.numel() for p in model.parameters())}")
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARMUP, LR / 20)
    warm = lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [WARMUP])
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(train) - SEQ, (BATCH, 1))
        batch = train[starts + torch.arange(SEQ)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: batch loss {loss.item():.3f}", flush=True)

    model = model.bfloat16()
    model.generation_config = GenerationConfig(**IDS)
    model.save_pretrained(OUT)
    tokenizer.save_pretrained(OUT)
    model = LlamaForCausalLM.from_pretrained(OUT)  # Measured as the tests will load it.
    print(f"train loss {loss_on(model, train):.3f}, val loss {loss_on(model, val):.3f} (bf16)")


if __name__ == "__main__":
    main()
