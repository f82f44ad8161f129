"""Random models of transformers, saved on disk with a tokenizer as their users have them."""

from functools import cache
from pathlib import Path

import torch
import transformers  # what is in it is loaded when a test first asks for it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "where is my card",
    "the exchange rate is wrong",
    "what is the answer to one and one",
    "i am 0 years old 1 2 3",
]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = 300

CONFIGS = {
    "bert": lambda: transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **SIZES),
    "roberta": lambda: transformers.RobertaConfig(
        vocab_size=WORDS, max_position_embeddings=66, pad_token_id=1, **SIZES
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=WORDS, max_position_embeddings=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=3, eos_token_id=3
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=WORDS,
        max_position_embeddings=64,
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=None,
        tie_word_embeddings=False,
        **SIZES,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        vocab_size=WORDS,
        max_position_embeddings=64,
        num_key_value_heads=1,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=True,
        **SIZES,
    ),
}
"""Settings of one tiny model of each family."""

ENCODERS = ("bert", "roberta", "distilbert")
DECODERS = ("gpt2", "llama", "qwen2")


@cache
def pieces():
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<mask>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(TEXTS, trainer)
    return found.to_str()


def tokenizer_of(family):
    found = Tokenizer.from_str(pieces())
    ends = [("<s>", 2), ("</s>", 3)]
    if family in ENCODERS:
        found.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ends
        )
    elif family == "llama":  # as the real one, it begins every text with a token and has none for pads
        found.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=ends
        )
    pads = {"pad_token": "<pad>"} if family in ENCODERS else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", **pads
    )


def save(family, folder, language=False, seed=0, **changes):
    """Save a model with random values; returns `hf/` and its folder, as `model` takes it."""
    settings = CONFIGS[family]()
    for name, value in changes.items():
        setattr(settings, name, value)
    kind = transformers.AutoModelForCausalLM if language else transformers.AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(settings)
    folder = Path(folder)
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    return f"hf/{folder}"
