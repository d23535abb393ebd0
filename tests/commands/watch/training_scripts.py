"""Training scripts of many kinds, as people write them: they know nothing of hookscope.

Each takes a file, into which it saves its weights and the state of torch's random numbers, and the number of a step at
whose beginning the data breaks; 0 for none.
"""

HEAD = """\
import sys
import torch
from torch import nn
from torch.nn import functional as F

TARGET, BREAK = sys.argv[1], int(sys.argv[2])

def batch(step, size=16):
    given = torch.randn(size, 8)
    return (given * float("nan") if step == BREAK else given), torch.randint(0, 3, (size,))

def save(*networks):
    weights = [each for network in networks for each in network.state_dict().values()]
    torch.save([*weights, torch.get_rng_state()], TARGET)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, given):
        return self.head(self.first(given))

torch.manual_seed(0)
"""

PLAIN = """
network = Net()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(1, 13):
    given, labels = batch(step)
    loss = F.cross_entropy(network(given), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
save(network)
"""

GAN = """
class Generator(nn.Sequential): pass
class Discriminator(nn.Sequential): pass
generator = Generator(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = Discriminator(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
fast = torch.optim.SGD(critic.parameters(), lr=0.1)
slow = torch.optim.Adam(generator.parameters(), lr=0.001)
for step in range(1, 13):
    real, _ = batch(step)
    fake = generator(torch.randn(16, 4))
    fast.zero_grad()
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    loss.backward()
    fast.step()
    slow.zero_grad()
    fooled = F.softplus(-critic(fake)).mean()
    fooled.backward()
    slow.step()
save(generator, critic)
"""

ACCUMULATED = """
network = Net()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
for step in range(1, 13):
    for part in range(3):
        given, labels = batch(step)
        (F.cross_entropy(network(given), labels) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
save(network)
"""

LBFGS = """
network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=4)
for step in range(1, 13):
    given, labels = batch(step)
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(network(given), labels)
        loss.backward()
        return loss
    optimizer.step(closure)
save(network)
"""

# The sixth step's loss is beyond float16: that step is skipped.
SCALED = """
network = Net()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(1, 25):
    given, labels = batch(step)
    loss = F.cross_entropy(network(given), labels)
    if step == 6 or 0 < BREAK <= step:
        loss = loss * float("inf")
    (scaler.scale(loss) / 2).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
save(network)
"""

BY_HAND = """
network = Net()
for step in range(1, 13):
    given, labels = batch(step)
    loss = F.cross_entropy(network(given), labels)
    network.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= 0.1 * parameter.grad
save(network)
"""

SUBCLASSED = """
class Halving(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)

network = Net()
optimizer = Halving(network.parameters(), lr=0.1)
for step in range(1, 13):
    given, labels = batch(step)
    F.cross_entropy(network(given), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
save(network)
"""

WORKERS = """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        leaf = torch.zeros(3, requires_grad=True)
        leaf.square().sum().backward()
        torch.optim.SGD([leaf], lr=0.1).step()
        broken = float("nan") if BREAK and index == 16 * (BREAK - 1) else 1.0
        return broken * torch.randn(8, generator=generator), index % 3

if __name__ == "__main__":
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for given, labels in DataLoader(Data(), batch_size=16, num_workers=1, multiprocessing_context=sys.argv[3]):
        loss = F.cross_entropy(network(given), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(network)
"""

COMPILED = """
network = torch.compile(Net(), backend=sys.argv[3])
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
for step in range(1, 13):
    given, labels = batch(step)
    loss = F.cross_entropy(network(given), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(network)
"""

COMPILED_STEP = """
network = Net()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

@torch.compile(backend=sys.argv[3])
def turn(given, labels):
    loss = F.cross_entropy(network(given), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for step in range(1, 13):
    turn(*batch(step))
save(network)
"""

PARTLY_OPTIMISED = """
network = Net()
network.requires_grad_(False)
network.head.requires_grad_(True)
network.first[0].bias.requires_grad_(True)
optimizer = torch.optim.SGD(network.head.parameters(), lr=0.1)
for step in range(1, 13):
    given, labels = batch(step)
    loss = F.cross_entropy(network(given), labels)
    torch.autograd.backward([loss, loss * 0])
    optimizer.step()
    optimizer.zero_grad()
save(network)
"""

SCRIPTS = {
    "plain": HEAD + PLAIN,
    "gan": HEAD + GAN,
    "accumulated": HEAD + ACCUMULATED,
    "lbfgs": HEAD + LBFGS,
    "scaled": HEAD + SCALED,
    "by-hand": HEAD + BY_HAND,
    "subclassed": HEAD + SUBCLASSED,
    "workers": HEAD + WORKERS,
    "compiled": HEAD + COMPILED,
    "compiled-step": HEAD + COMPILED_STEP,
    "partly-optimised": HEAD + PARTLY_OPTIMISED,
}

DISTRIBUTED = """
import contextlib
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()

def save_once(network, *more):
    if rank == 0:
        save(network, *more)
    torch.distributed.barrier()

torch.manual_seed(rank + 1)
draws = torch.get_rng_state()
torch.manual_seed(0)
"""

DDP = """
network = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
torch.set_rng_state(draws)
for step in range(1, 13):
    for part in range(2):
        with network.no_sync() if part == 0 else contextlib.nullcontext():
            given, labels = batch(step if rank else -1)
            loss = F.cross_entropy(network(given), labels)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save_once(network.module)
"""

FSDP = """
import json
from torch.distributed.fsdp import fully_shard
network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5), nn.GELU(), nn.Linear(5, 3))
fully_shard(network[0])
fully_shard(network)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
torch.set_rng_state(draws)
told = []

def whole():
    return {name: each.detach().full_tensor().clone() for name, each in network.named_parameters()}

for step in range(1, 13):
    given, labels = batch(step if rank else -1)
    loss = F.cross_entropy(network(given), labels)
    loss.backward()
    before = whole() if len(sys.argv) > 3 else {}
    gradients = {name: each.grad.full_tensor() for name, each in network.named_parameters()} if before else {}
    optimizer.step()
    after = whole() if before else {}
    told.append({
        name: [float(before[name].norm()), float(gradients[name].norm()), float((after[name] - before[name]).norm())]
        for name in before
    })
    optimizer.zero_grad()
if len(sys.argv) > 3 and rank == 0:
    print(json.dumps(told), flush=True)
weights = [each.full_tensor() for each in network.state_dict().values()]
if rank == 0:
    torch.save([*weights, torch.get_rng_state()], TARGET)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

EDITED = """
network = Net()
WRAP
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
own = getattr(network, "module", network)
BEGIN
for step in range(1, 9):
    given, labels = batch(step)
    F.cross_entropy(network(given), labels).backward()
    BEFORE_STEP
    optimizer.step()
    AFTER_STEP
    optimizer.zero_grad()
"""

CLAMP = "own.head.weight.data.clamp_(-0.1, 0.1)"
SCALE = "lambda gradient: gradient * 0.5"

EDITS = {  # as options, and as somebody would write them: once before the loop, before each step, and after it
    "frozen": ("param:first.0.*:freeze", "own.first[0].requires_grad_(False)", "", ""),
    "gradients": ("param:*:grad:clamp(-0.01, 0.01)", "", "nn.utils.clip_grad_value_(own.parameters(), 0.01)", ""),
    "values": ("param:head.weight:value:clamp(-0.1, 0.1)", CLAMP, "", CLAMP),
    "output gradient": (
        "/^head$/:grad:scale(0.5)",
        f"own.head.register_forward_hook(lambda _module, _args, output: output.register_hook({SCALE}) and None)",
        "",
        "",
    ),
    "output": (
        "/^first.0$/:output:scale(0.5)",
        "own.first[0].register_forward_hook(lambda _module, _args, output: output * 0.5)",
        "",
        "",
    ),
}


def edited_script(case: str, *, distributed: bool) -> tuple[str, str]:
    """Return a script that is to be edited, and one with the edit made by hand."""
    _, *by_hand = EDITS[case]
    wrap = "network = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)"
    wrap += "\ntorch.set_rng_state(draws)"
    head = HEAD + (DISTRIBUTED if distributed else "") + EDITED.replace("WRAP", wrap if distributed else "")
    head += "save_once(own)" if distributed else "save(own)"
    scripts = []
    for lines in (["", "", ""], by_hand):
        source = head
        for place, line in zip(("BEGIN", "BEFORE_STEP", "AFTER_STEP"), lines, strict=True):
            source = source.replace(f"{place}\n", f"{line or 'pass'}\n")
        scripts.append(source)
    return scripts[0], scripts[1]


DISTRIBUTED_SCRIPTS = {"ddp": HEAD + DISTRIBUTED + DDP, "fsdp": HEAD + DISTRIBUTED + FSDP}


DATA = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"given": torch.randn(8, generator=generator), "labels": index % 3}

class Counting(Net):
    count = 0

    def forward(self, given, labels):
        if self.training:
            self.count += 1
        logits = super().forward(given * float("nan") if self.count == BREAK else given)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
"""

TRAINER = """
import transformers
network = Counting()
arguments = transformers.TrainingArguments(
    "trained", max_steps=12, per_device_train_batch_size=16, learning_rate=0.01, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=1.0, seed=0,
)
transformers.Trainer(network, arguments, train_dataset=Data()).train()
save(network)
"""

LIGHTNING = """
import warnings
warnings.filterwarnings("ignore")
import lightning

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Counting()

    def training_step(self, batch, index):
        return self.network(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

lit = Lit()
trainer = lightning.Trainer(
    max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)
trainer.fit(lit, torch.utils.data.DataLoader(Data(), batch_size=16))
save(lit.network)
"""

FRAMEWORK_SCRIPTS = {"transformers": HEAD + DATA + TRAINER, "lightning": HEAD + DATA + LIGHTNING}
