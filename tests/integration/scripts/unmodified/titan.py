"""A transformer as torchtitan trains it: built on the meta device, checkpointed and sharded block by block."""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, STEPS, WARMUP = 64, 16, 64, 4, 2, 16, 4


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(layer))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
    fully_shard(model.tok_embeddings, **options)
    for layer in model.layers.values():
        fully_shard(layer, **options)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (512, 1), generator=torch.Generator().manual_seed(rank))
    data = (tokens + torch.arange(LENGTH + 1)) % VOCABULARY
    while True:
        for batch in DataLoader(data, batch_size=4):
            yield batch[:, :-1], batch[:, 1:]


def report(step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer()
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    data = batches(dist.get_rank())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        inputs, labels = next(data)
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        if step % 4 == 0:
            report(step, loss.detach() / dist.get_world_size(), norm.full_tensor())
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if mesh.get_rank() == 0:
        torch.save(state, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
