"""The script that a user writes for Lightning, with and without the callback: everything is compared."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.pipeline.optimizer_steps import present_state
from tried import tried

warnings.simplefilter("ignore")
lightning = pytest.importorskip("lightning", reason="lightning is not installed (the extra dev)")
torchmetrics = pytest.importorskip("torchmetrics", reason="it comes with lightning")
loggers = pytest.importorskip("lightning.pytorch.loggers")
Cap = pytest.importorskip("lowtide.integrations.lightning").Cap

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BATCH, WIDTH, CLASSES = 64, 32, 10
NUMBERS = 64
"""The bytes of single numbers that Lightning keeps besides the step: the loss twice, and what is logged."""


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.body = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (logits.argmax(1) == y).float().mean(), "rows": float(len(y))})
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(loggers.Logger):
    """Keeps all that is logged."""

    name, version, experiment = "rows", 0, None

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def own(self):
        return [row for row in self.rows if not any(name.startswith("lowtide/") for name in row[1])]


def data(batches=5, rows=BATCH):
    """Batches of some rows; where they are not whole, the last one has fewer."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(int(batches * rows), WIDTH, generator=made)
    y = torch.randint(CLASSES, (len(x),), generator=made)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=rows)


def trained(kind, folder, callbacks=(), *, validation=False, batches=5, rows=BATCH, **options):
    torch.manual_seed(0)
    module, logger = kind(), Rows()
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": logger,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    trainer = lightning.Trainer(**{**settings, **options})
    trainer.fit(module, data(batches, rows), data(2) if validation else None)
    return module, trainer, logger


def same_with_and_without(kind, folder, budget="70%", *, cap=None, **options):
    """Train both ways: weights, buffers, random state and all logged values must be the same."""
    cap = cap or Cap(budget, prices="roofline")
    plain, _, logged = trained(kind, folder, **options)
    drawn = torch.get_rng_state()
    capped, trainer, logged_too = trained(kind, folder, [cap], **options)
    assert torch.equal(drawn, torch.get_rng_state())
    assert_same(plain, capped)
    assert logged.own() == logged_too.own()
    assert not {"training_step", "log", "log_dict", "__lowtide__"} & set(vars(capped))
    assert "training_step" not in vars(trainer.strategy)
    return cap, trainer


def assert_same(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def plans_said(messages):
    return [message for message in messages if message.startswith("planned:")]


@tried("Lightning", "the whole `training_step`; log, loggers and report")
def test_one_line_caps_the_whole_step(tmp_path, caplog_lowtide):
    cap, trainer = same_with_and_without(Net, tmp_path, max_epochs=2)
    assert len(plans_said(caplog_lowtide)) == 1
    assert cap.plan.graph.fixed["optimizer"] > 0
    assert cap.plan.peak <= cap.plan.budget < cap.plan.uncapped.peak
    assert abs(cap.measured - cap.measured_plan.peak) <= NUMBERS
    assert not any("outside of the captured step" in message for message in caplog_lowtide)
    rows = [row for _, row in trainer.logger.rows if "lowtide/predicted_peak" in row]
    assert rows[-1] == {
        "lowtide/predicted_peak": cap.plan.peak,
        "lowtide/measured_peak": cap.measured,
    }
    assert "<svg" in (tmp_path / "lowtide.html").read_text()


def test_the_line_of_the_documents():
    assert lowtide.integrations.lightning.Cap is Cap


def test_importing_the_room_imports_no_tool():
    code = "import sys, lowtide.integrations; assert not {'lightning', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@tried("Lightning", "`accumulate_grad_batches`")
def test_accumulated_batches(tmp_path):
    cap, _ = same_with_and_without(Net, tmp_path, "80%", accumulate_grad_batches=2)
    assert abs(cap.measured - cap.measured_plan.peak) <= NUMBERS


@tried("Lightning", '`precision="bf16-mixed"`, `gradient_clip_val`')
def test_mixed_precision_and_clipping(tmp_path):
    cap, _ = same_with_and_without(Net, tmp_path, "80%", precision="bf16-mixed", gradient_clip_val=0.1)
    assert abs(cap.measured - cap.measured_plan.peak) <= NUMBERS


@tried("Lightning", "a share as the budget, a smaller last batch")
def test_a_last_batch_with_fewer_rows(tmp_path, caplog_lowtide):
    same_with_and_without(Net, tmp_path, "60%", batches=2.1, rows=256)
    assert len(plans_said(caplog_lowtide)) == 1  # the small one keeps everything
    assert any("60% of the uncapped peak of a smaller batch" in message for message in caplog_lowtide)


class WithMetrics(Net):
    """Logs a metric, its value and a collection; returns more than the loss; validates in between."""

    def __init__(self):
        super().__init__()
        kinds = {"task": "multiclass", "num_classes": CLASSES}
        self.accuracy = torchmetrics.Accuracy(**kinds)
        self.both = torchmetrics.MetricCollection(
            {"precision": torchmetrics.Precision(**kinds), "recall": torchmetrics.Recall(**kinds)}
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        right = self.accuracy(logits, y)
        self.log("right", right)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.both.update(logits, y)
        self.log_dict(self.both.compute())
        self.log("loss", loss.item())
        return {"loss": loss, "right": right, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("mean logit", outputs["logits"].mean() + outputs["right"])

    def validation_step(self, batch, batch_idx):
        self.log("validation", nn.functional.cross_entropy(self(batch[0]), batch[1]))


@tried("Lightning", "BatchNorm, dropout, torchmetrics, validation in between")
def test_metrics_and_validation(tmp_path, caplog_lowtide):
    same_with_and_without(WithMetrics, tmp_path, validation=True, val_check_interval=2)
    assert len(plans_said(caplog_lowtide)) == 1


class Weighted(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + batch_idx)


def test_values_that_change_with_the_batch_leave_the_network_capped(tmp_path, caplog_lowtide):
    cap, _ = same_with_and_without(Weighted, tmp_path, "80%", batches=6)
    assert sum("Its network self is capped instead" in message for message in caplog_lowtide) == 1
    assert cap.plan.graph.boundary > 0


class Printing(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        print("the loss is", loss.item())
        return loss


def test_a_line_that_cannot_be_captured_is_named(tmp_path, caplog_lowtide, capsys):
    same_with_and_without(Printing, tmp_path, "80%")
    told = next(message for message in caplog_lowtide if "is not planned as a whole" in message)
    assert 'print("the loss is", loss.item())' in told
    assert capsys.readouterr().out.count("the loss is") == 10


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@tried("Lightning", "`automatic_optimization = False`: the network")
def test_manual_optimization_caps_the_network(tmp_path, caplog_lowtide):
    same_with_and_without(ByHand, tmp_path, "80%")
    assert any("automatic_optimization = False" in message for message in caplog_lowtide)
    assert any("gradients of the step before" in message for message in caplog_lowtide)


class TwoOptimizers(ByHand):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.body, self.head)]


def test_parts_that_are_called_one_by_one(tmp_path):
    with pytest.raises(lowtide.CaptureError, match=r"self\.body is only a part of what it trains"):
        trained(TwoOptimizers, tmp_path, [Cap("80%")])
    cap = Cap("80%", module="body", prices="roofline")
    same_with_and_without(TwoOptimizers, tmp_path, cap=cap)
    assert cap.plan is not None


class LooksAtGradients(Net):
    def on_before_zero_grad(self, optimizer):
        seen = [p.grad.abs().sum() for p in self.parameters() if p.grad is not None]
        self.log("seen", sum(seen, torch.zeros(())))


class ZeroesInPlace(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("kind", [LooksAtGradients, ZeroesInPlace])
def test_hooks_see_the_gradients_that_they_saw(kind, tmp_path):
    same_with_and_without(kind, tmp_path, batches=3)


@tried("Lightning", "checkpoints, and training that goes on from one")
def test_checkpoints_have_the_same_keys_and_go_on(tmp_path):
    kept = []
    for callbacks in ([], [Cap("70%", prices="roofline")]):
        module, trainer, _ = trained(Net, tmp_path, callbacks)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        kept.append(torch.load(tmp_path / "half.ckpt", weights_only=False))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        kept.append(module)
    assert kept[0].keys() == kept[2].keys()
    assert kept[0]["state_dict"].keys() == kept[2]["state_dict"].keys()
    assert kept[2]["callbacks"] == {}
    assert_same(kept[1], kept[3])


def test_the_report_lies_beside_the_logs(tmp_path):
    logger = loggers.CSVLogger(tmp_path)
    trained(Net, tmp_path, [Cap("70%", prices="roofline")], logger=logger, batches=3)
    assert (tmp_path / "lightning_logs" / "version_0" / "lowtide.html").exists()
    trained(Net, tmp_path / "none", [Cap("70%", prices="roofline", report=False)], batches=3)
    assert not (tmp_path / "none" / "lowtide.html").exists()


class Wrong(Net):
    def training_step(self, batch, batch_idx):
        return self(batch[0][:, :3]).sum()


def test_refusals(tmp_path):
    with pytest.raises(lowtide.LowtideError, match="Cap needs a budget"):
        Cap()
    with pytest.raises(lowtide.LowtideError, match=r"integrations\.lightning\.Cap"):
        lowtide.cap(Net(), "1MiB")
    with pytest.raises(lowtide.LowtideError, match=r"'boddy' is not a module of Net; it has body, head"):
        trained(Net, tmp_path, [Cap("1MiB", module="boddy")])
    with pytest.raises(lowtide.BudgetTooSmall):
        trained(Net, tmp_path, [Cap("10KiB", prices="roofline")])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trained(Wrong, tmp_path, [Cap("1MiB", prices="roofline")])


class CapsItself(Net):
    def __init__(self):
        super().__init__()
        lowtide.cap(self.body, "1MiB", prices="roofline")


def test_a_step_has_one_budget(tmp_path):
    with pytest.raises(lowtide.LowtideError, match="'body' is capped already"):
        trained(CapsItself, tmp_path, [Cap("1MiB")])


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.net = nn.Sequential(*layers)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


def by_fabric(order, precision):
    """Three steps of a model that Fabric has set up; gives its weights, and the plan and the peak of one."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if order == "cap, then set up":
        lowtide.cap(model, "80%", optimizer=optimizer, prices="roofline")
    ready, wrapped = fabric.setup(model, optimizer)
    if order == "set up, then cap":
        assert lowtide.cap(ready, "80%", optimizer=wrapped, prices="roofline") is ready
    seen = None

    def step(x, y):
        fabric.backward(ready(x, y))

    for x, y in data(3):
        taken = lowtide.measure(
            lambda x=x, y=y: step(x, y), device="cpu", resident=present_state(optimizer, model.parameters())
        )
        seen = None if order is None else (lowtide.plan_of(ready).peak, taken.peak)
        wrapped.step()
        wrapped.zero_grad()
    if order is not None:
        lowtide.uncap(ready)
        assert not hasattr(model, "__lowtide__")
    return ready.state_dict(), seen


@tried("Fabric", "`cap` before and after `setup`, in single and mixed precision")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("order", ["cap, then set up", "set up, then cap"])
def test_fabric(order, precision):
    plain, _ = by_fabric(None, precision)
    capped, (planned, taken) = by_fabric(order, precision)
    assert list(plain) == list(capped)
    assert all(torch.equal(plain[name], capped[name]) for name in plain)
    of_the_loop = BATCH * WIDTH * 4 if precision == "bf16-mixed" else 0  # Fabric casts a copy of the batch
    assert taken == planned + of_the_loop


@tried("Lightning", "`step_in_backward=True`")
def test_an_optimizer_that_steps_inside_of_the_backward(tmp_path):
    cap = Cap("90%", prices="roofline", step_in_backward=True)
    same_with_and_without(Net, tmp_path, cap=cap)
    assert cap.plan.gradient_bytes == 0


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"gradient_clip_val": 0.5}, "clips gradients .gradient_clip_val=0.5"),
        ({"accumulate_grad_batches": 2}, "accumulated over 2 batches"),
    ],
)
def test_what_needs_all_gradients_is_refused_before_training(tmp_path, choices, said):
    cap = Cap("90%", prices="roofline", step_in_backward=True)
    with pytest.raises(lowtide.LowtideError, match=f"step_in_backward=True cannot be used here: .*{said}"):
        trained(Net, tmp_path, [cap], **choices)
