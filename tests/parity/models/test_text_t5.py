"""Captions to embeddings: our tokenizer and encoder against what diffusers' pipelines do, from the same files."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.text_encoders.t5.names import t5_part
from flame_train.text_encoders.t5.tokenizer import T5Tokenizer, find_vocabulary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["a photo of a cat", "", "a red barn by the lake, " * 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A diffusers folder with `tokenizer_2` and `text_encoder_2`, the latter in two shards, as transformers save it."""
    root = tmp_path_factory.mktemp("flux")
    (root / "tokenizer_2").mkdir()
    corpus = ["a photo of a cat", "a red barn by the lake", "the cat by the barn", "a photo of the lake"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(root / "tokenizer_2" / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=200, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    transformers.T5EncoderModel(config).save_pretrained(root / "text_encoder_2", max_shard_size="40KB")
    assert len(list((root / "text_encoder_2").glob("*.safetensors"))) > 1
    return root


@pytest.mark.parametrize(("family", "length"), [("flux", 512), ("flux", 32), ("sd3", 77)])
def test_captions_to_embeddings(folder, family, length):
    diffusers = pytest.importorskip("diffusers")
    pipeline = diffusers.FluxPipeline if family == "flux" else diffusers.StableDiffusion3Pipeline
    encoder = transformers.T5EncoderModel.from_pretrained(folder / "text_encoder_2").eval()
    tokenizer = transformers.T5Tokenizer.from_pretrained(folder / "tokenizer_2")
    parts = SimpleNamespace(
        tokenizer_2=tokenizer,
        tokenizer_3=tokenizer,
        text_encoder=encoder,
        text_encoder_2=encoder,
        text_encoder_3=encoder,
        tokenizer_max_length=77,
        _execution_device="cpu",
    )
    with torch.no_grad():
        expected = pipeline._get_t5_prompt_embeds(parts, PROMPTS, max_sequence_length=length).numpy()

    ours = T5Tokenizer(find_vocabulary([folder], "model.t5_vocabulary"))
    ids = np.stack([ours.row(prompt, length).ids for prompt in PROMPTS])
    found = t5_part(folder).load(device="cpu", dtype="float32")(tensor(ids)).numpy()
    assert found.shape == expected.shape == (3, length, 32)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
