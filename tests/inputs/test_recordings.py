"""Recordings as inputs: decoded, brought to the network's channels and sampling rate, given as plain PyTorch would."""

import math
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hookscope
from hookscope.errors import HookscopeError, ImageError, UsageError
from hookscope.inputs.find_files import find_inputs
from hookscope.inputs.loading import load_input
from hookscope.models.input_spec import default_preprocessing, example_shape
from hookscope.results.inputs import Preprocessing, Waveform


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> NDArray[np.float64]:
    return 0.5 * np.sin(2 * math.pi * hertz * np.arange(int(rate * seconds)) / rate)


def write_wave(path: Path, rate: int, *channels: NDArray[np.float64]) -> NDArray[np.int16]:
    """Write 16-bit PCM with the standard library; return the samples, (L, C)."""
    samples = np.round(np.stack(channels, 1) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return samples


class Speech(nn.Module):
    def __init__(self, channels: int = 1, rate: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv1d(channels, 4, 9, stride=4), nn.Linear(4, 3)
        if rate is not None:
            self.sample_rate = rate

    def forward(self, x: Tensor) -> Tensor:  # (N, C, L)
        scores: Tensor = self.head(self.conv(x).mean(2))
        return scores


def test_a_recording_is_one_input_with_the_numbers_of_plain_pytorch(tmp_path: Path) -> None:
    samples = write_wave(tmp_path / "speech.wav", 8000, tone(8000))
    model = Speech().eval()
    run = hookscope.activations(model, str(tmp_path / "speech.wav"), layer="*")
    expected = model(torch.from_numpy(samples.T / 32768).float()[None])
    assert run["(model)"].l2 == pytest.approx(expected.norm().item(), rel=1e-6)
    (record,) = run.inputs
    assert (record.shape, record.sampling_rate) == ((1, 4000), 8000)
    assert "sampling rate kept: the network's is not known" in record.steps
    assert "speech.wav at 8,000 Hz (as recorded)" in " ".join(str(run).split())
    resampled = hookscope.activations(Speech(rate=16_000), str(tmp_path / "speech.wav"))
    assert "speech.wav at 16,000 Hz (resampled)" in " ".join(str(resampled).split())
    assert find_inputs([str(tmp_path)]) == [tmp_path / "speech.wav"]


def test_a_recording_is_brought_to_the_rate_that_the_network_names(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", 48_000, tone(48_000))
    values, record = load_input(tmp_path / "a.wav", default_preprocessing(Speech(rate=16_000)))
    assert (tuple(values.shape), record.sampling_rate) == ((1, 8000), 16_000)
    assert "resampled from 48,000 to 16,000 Hz (soxr)" in record.steps
    wanted = tone(16_000)  # the same tone, sampled at that rate
    inside = slice(400, -400)  # filters reach over the ends
    assert np.abs(values[0].numpy()[inside] - wanted[inside]).max() < 1e-3


def test_channels_are_those_of_the_network(tmp_path: Path) -> None:
    left, right = tone(8000), tone(8000, hertz=300)
    samples = write_wave(tmp_path / "two.wav", 8000, left, right).astype(np.float64) / 32768

    def read(waveform: Waveform | None) -> NDArray[np.float32]:
        return load_input(tmp_path / "two.wav", Preprocessing(waveform=waveform))[0].numpy()

    for kept in (Waveform(2), None):
        np.testing.assert_array_equal(read(kept), samples.T.astype(np.float32))
    np.testing.assert_allclose(read(Waveform(1)), samples.mean(1)[None], atol=1e-7)
    np.testing.assert_allclose(read(Waveform(None)), samples.mean(1), atol=1e-7)
    whole = read(Waveform(None, is_normalised=True)).astype(np.float64)
    assert (whole.mean(), whole.var()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-4))
    with pytest.raises(ImageError, match="it has 2 channels, and the network takes 4"):
        read(Waveform(4))


def test_what_a_network_takes_follows_from_its_first_layer_and_what_it_calls_its_rate() -> None:
    assert default_preprocessing(Speech(2)).waveform == Waveform(2)
    assert default_preprocessing(Speech(rate=24_000)).waveform == Waveform(1, 24_000)
    assert default_preprocessing(nn.Linear(100, 2)).waveform == Waveform(None)
    assert default_preprocessing(nn.Conv2d(1, 2, 3)).waveform is None
    assert default_preprocessing(nn.LazyConv1d(2, 3)).waveform is None  # its channels are not known yet
    odd = Speech()
    odd.sampling_rate = True  # type: ignore[assignment] # no rate
    assert default_preprocessing(odd).waveform == Waveform(1)


def damaged(path: Path) -> list[Path]:
    write_wave(path / "whole.wav", 8000, tone(8000))
    whole = (path / "whole.wav").read_bytes()
    contents = {
        "header.wav": whole[:20],
        "none.wav": whole[:44][:40] + b"\0\0\0\0",
        "noise.wav": b"RIFF\xff\xff\xff\xffWAVE" + bytes(range(256)) * 4,
        "noise.flac": b"fLaC" + bytes(range(256)) * 4,
    }
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return [path / name for name in contents]


def test_damaged_recordings_are_one_line(tmp_path: Path) -> None:
    for path in damaged(tmp_path):
        with pytest.raises(ImageError) as raised:
            load_input(path, default_preprocessing(Speech()))
        assert str(raised.value).startswith(f"Cannot read '{path}': ")
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_without_the_packages_one_line_names_the_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write_wave(tmp_path / "a.wav", 8000, tone(8000))
    with pytest.raises(UsageError, match=r"a\.wav' is a recording, .*: pip install 'hookscope\[audio\]'$") as raised:
        hookscope.activations(Speech(rate=16_000), str(tmp_path / "a.wav"))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.exhaustive
def test_cut_off_and_mutated_recordings_raise_only_our_errors(tmp_path: Path) -> None:
    write_wave(tmp_path / "whole.wav", 8000, tone(8000, 0.02))
    whole, random = (tmp_path / "whole.wav").read_bytes(), np.random.default_rng(0)
    path = tmp_path / "mutated.wav"
    for _ in range(150):
        content = bytearray(whole[: random.integers(1, len(whole) + 1)])
        for place in random.integers(0, min(len(content), 60), 3):
            content[place] = random.integers(256)
        path.write_bytes(content)
        try:
            values, _ = load_input(path, default_preprocessing(Speech()))
        except HookscopeError as error:
            lines = str(error).splitlines()
        else:
            lines = [str(values.numel())]
        assert len(lines) == 1


@pytest.mark.exhaustive
def test_a_folder_of_transformers_tells_its_sampling_rate(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=12, num_labels=3, classifier_proj_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Wav2Vec2ForSequenceClassification(config).save_pretrained(tmp_path / "net")
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=16_000, do_normalize=True)
    extractor.save_pretrained(tmp_path / "net")
    samples = write_wave(tmp_path / "a.wav", 16_000, tone(16_000)).astype(np.float64)[:, 0] / 32768
    run = hookscope.activations(str(tmp_path / "net"), tmp_path / "a.wav", layer="classifier")
    model = transformers.Wav2Vec2ForSequenceClassification.from_pretrained(tmp_path / "net").eval()
    options = extractor(samples, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = model(**options).logits
    assert run["classifier"].l2 == pytest.approx(expected.norm().item(), rel=1e-4)
    assert run.inputs[0].sampling_rate == 16_000
    assert example_shape(model, default_preprocessing(model)) == (1, 16_000)
