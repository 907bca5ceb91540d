"""docs/opacus.md: its scripts run as they stand, and what it says of sampling, refusals and names is so."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgp

PAGE = (Path(__file__).parents[2] / "docs" / "opacus.md").read_text()
CNN, LSTM, LORA = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def script(diff: str, side: str = "+") -> str:
    """One side of a diff, without its marks."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f"{side} \n")


def run_script(text: str, **names):
    scope = {"torch": torch, "nn": nn, "F": F, **names}
    exec(text, scope)
    return scope


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def texts() -> list[tuple[torch.Tensor, int]]:
    """The label decides between words below and above 50; lengths differ."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (512,), generator=draw).tolist()
    labels = torch.randint(2, (512,), generator=draw).tolist()
    return [(torch.randint(1, 50, (n,), generator=draw) + 50 * y, y) for n, y in zip(lengths, labels, strict=True)]


def padded(rows):
    words = nn.utils.rnn.pad_sequence([w for w, _ in rows], batch_first=True)
    return words, torch.tensor([len(w) for w, _ in rows]), torch.tensor([y for _, y in rows])


def test_the_convolutional_script(capsys):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (1024,), generator=draw)
    x = torch.randn(1024, 1, 8, 8, generator=draw) + y.view(-1, 1, 1, 1)
    scope = run_script(script(CNN), make_cnn=make_cnn, dataset=TensorDataset(x, y))
    assert isinstance(scope["model"][1], nn.GroupNorm)
    spent = [float(word) for word in capsys.readouterr().out.split()]
    assert len(spent) == 3 and spent == sorted(spent) and 7.5 < spent[-1] <= 8


def test_the_lstm_script_learns_and_its_old_line_is_refused():
    scope = run_script(script(LSTM), dataset=texts(), padded=padded)
    words, lengths, labels = padded(texts())
    accuracy = (scope["model"](words, lengths).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.8
    new = "states[torch.arange(len(words)), lengths - 1]"
    assert new in script(LSTM)
    with pytest.raises(rgp.UnsupportedError):
        run_script(script(LSTM).replace(new, "states[:, -1]"), dataset=texts(), padded=padded)


def test_the_lora_script(tmp_path):
    pytest.importorskip("accelerate")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    bert = transformers.BertForSequenceClassification(config)

    def collate(rows):
        words, lengths, labels = padded(rows)
        mask = (torch.arange(words.shape[1]) < lengths.unsqueeze(1)).long()
        return {"input_ids": words, "attention_mask": mask, "labels": labels}

    before = {name: p.clone() for name, p in bert.named_parameters()}
    scope = run_script(
        script(LORA),
        bert=bert,
        collate=collate,
        dataset=texts()[:128],
        folder=str(tmp_path),
        get_peft_model=peft.get_peft_model,
        LoraConfig=peft.LoraConfig,
        TrainingArguments=transformers.TrainingArguments,
    )
    assert 7 < scope["trainer"].epsilon() <= 8
    after = dict(scope["model"].named_parameters())
    assert any(p.abs().max() > 0 for name, p in after.items() if "lora_B" in name)  # they begin at zero
    words = next(p for name, p in after.items() if name.endswith("word_embeddings.weight"))
    assert torch.equal(words, before["bert.embeddings.word_embeddings.weight"])


def test_rate_and_divisor_are_what_the_page_says():
    """1000 rows in batches of 64: drawn at 0.064, and divided by 64 whatever the draw was."""
    data = TensorDataset(torch.ones(1000, 1))
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is private without noise
        run = rgp.privatize(
            model,
            optimizer,
            data,
            method=rgp.DPSGD(),
            noise_multiplier=0,
            clip=1.0,
            batch_size=64,
            steps=1,
            microbatch_size=1000,
            seed=3,
            probe=False,  # rows that are all alike would tell it nothing
        )
    drawn = 0
    for (x,) in run:
        drawn = len(x)
        run.step(model(x).mean())  # every example's gradient is 1
    run.close()
    assert drawn != 64
    assert run.mechanism.rate(0) == pytest.approx(0.064)
    assert start - model.weight.item() == pytest.approx(drawn / 64, rel=1e-4)


def test_a_data_loader_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32).long()), batch_size=8)
    with pytest.raises(ValueError, match="dataset"):
        rgp.privatize(model, optimizer, loader, noise_multiplier=1.0, batch_size=8, steps=1)


def test_the_clip_rules_of_the_table():
    found = re.findall(r"`clip=(rgp\.[^`]+\))`", PAGE)
    assert len(found) == 3
    for rule in found:
        model = make_cnn()
        rgp.fix(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(32, 1, 8, 8), torch.zeros(32).long())
        with rgp.privatize(
            model, optimizer, data, method=rgp.DPSGD(), clip=eval(rule), noise_multiplier=1.0, batch_size=8, steps=1
        ) as run:
            for x, y in run:
                run.step(F.cross_entropy(model(x), y))
        assert run.step_index == 1


def test_the_names_of_the_page_exist():
    for name in set(re.findall(r"rgp\.(\w+)[(`]", PAGE)):
        assert hasattr(rgp, name), name
    for name in set(re.findall(r"run\.(\w+)", PAGE)):
        assert hasattr(rgp.Run, name), name


def test_the_accounting_example_of_the_page():
    from rgp.accounting import Event, epsilon

    events = [Event(0.01, 1.0, count=1000)]
    assert f"{epsilon(events, delta=1e-5):.2f} here" in PAGE
    assert f"{epsilon(events, delta=1e-5, accountant='rdp'):.2f} by RDP" in PAGE


@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=lambda method: method.name)
def test_a_generator_learns_beside_a_private_discriminator_and_leaves_it_alone(method):
    """The discriminator's weights are the same to the bit as without the generator's gradients, which are plain autograd's."""
    real = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))

    def train(beside: bool) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        generator = nn.Linear(3, 6)
        discriminator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        parameters, steps = list(generator.parameters()), 0
        with rgp.privatize(
            discriminator, optimizer, TensorDataset(real), method=method, noise_multiplier=1.0, batch_size=16, steps=3,
            microbatch_size=4, seed=1,
        ) as run:  # fmt: skip
            for (x,) in run:
                with torch.no_grad():
                    fake = generator(torch.randn(len(x), 3))
                stepped = run.step(F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake)).mean())
                if stepped and beside:
                    steps += 1
                    codes = torch.ones(2, 3)
                    found = torch.autograd.grad(F.softplus(-discriminator(generator(codes))).mean(), parameters)
                    twin = [p.detach().clone().requires_grad_() for p in parameters]
                    plain = nn.Sequential(*discriminator).requires_grad_(True)
                    loss = F.softplus(-plain(F.linear(codes, *twin))).mean()
                    for mine, expected in zip(found, torch.autograd.grad(loss, twin), strict=True):
                        assert expected.abs().max() > 0
                        assert torch.equal(mine, expected)
                    F.softplus(-discriminator(generator(codes))).mean().backward()  # its own, which the run lets pass
                    for mine, parameter in zip(found, parameters, strict=True):
                        assert torch.equal(mine, parameter.grad)
                        parameter.grad = None
        return discriminator, steps

    (alone, _), (beside, steps) = train(False), train(True)
    assert steps == 3
    for a, b in zip(alone.parameters(), beside.parameters(), strict=True):
        assert torch.equal(a, b)
