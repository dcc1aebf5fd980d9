"""Speech, state spaces, experts and reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bank.live.case import Case, Made
from bank.live.generative import vectors
from catalog import seeded
from surgery.net import Net


def frames(length: int = 12, features: int = 8) -> Tensor:
    return seeded(2, length, features)


# --- speech ---------------------------------------------------------------------------------------------


class Conformer(nn.Module):
    """Half feed-forwards around attention and a depthwise convolution with a batch norm over channels."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.ff1, self.ff2 = self._feed_forward(dim), self._feed_forward(dim)
        self.norm_attn, self.attn = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm_conv, self.pointwise1 = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.bn, self.pointwise2 = nn.BatchNorm1d(dim), nn.Conv1d(dim, dim, 1)
        self.final = nn.LayerNorm(dim)

    @staticmethod
    def _feed_forward(dim: int) -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        y = self.norm_attn(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        y = F.glu(self.pointwise1(self.norm_conv(x).transpose(1, 2)), dim=1)
        x = x + self.pointwise2(F.silu(self.bn(self.depthwise(y)))).transpose(1, 2)
        return self.final(x + 0.5 * self.ff2(x))


def positional_conv(norm: Callable[..., nn.Module]) -> Callable[[], Made]:
    """wav2vec 2.0's convolution of positions, normalised over its last axis."""

    def make() -> Made:
        conv = norm(nn.Conv1d(8, 8, 4, padding=2, groups=2), name="weight", dim=2)
        compute = lambda m, x: m.fc(x + F.gelu(m.conv(x.transpose(1, 2))[..., :-1]).transpose(1, 2))  # noqa: E731
        return Net(compute, conv=conv, fc=nn.Linear(8, 8)), frames()

    return make


class HiFiGAN(nn.Module):
    """Transposed convolutions and residual blocks under old weight norms."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.weight_norm
        self.conv_pre = norm(nn.Conv1d(8, 8, 7, padding=3))
        self.ups = nn.ModuleList([norm(nn.ConvTranspose1d(8, 4, 4, 2, 1))])
        self.resblocks = nn.ModuleList([norm(nn.Conv1d(4, 4, 3, padding=1)), norm(nn.Conv1d(4, 4, 3, 1, 3, 3))])
        self.conv_post = norm(nn.Conv1d(4, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for up in self.ups:
            x = up(F.leaky_relu(x, 0.1))
            x = sum(x + block(F.leaky_relu(x, 0.1)) for block in self.resblocks) / len(self.resblocks)
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


def made_recurrent(kind: type[nn.RNNBase], features: int, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        rnn = kind(8, 6, batch_first=True, **options)
        return Net(lambda m, x: m.fc(m.rnn(x)[0]), rnn=rnn, fc=nn.Linear(features, 3)), frames(6)

    return make


class TCN(nn.Module):
    """Dilated causal convolutions under new weight norms, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.conv1 = norm(nn.Conv1d(8, 6, 3, padding=2, dilation=1))
        self.conv2 = norm(nn.Conv1d(6, 6, 3, padding=4, dilation=2))
        self.downsample = nn.Conv1d(8, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x)[..., :-2])
        return F.relu(F.relu(self.conv2(y)[..., :-4]) + self.downsample(x))


SPEECH = [
    Case("conformer", "speech", lambda: (Conformer(), frames())),
    Case("wav2vec positions, old weight_norm", "speech", positional_conv(nn.utils.weight_norm)),
    Case("wav2vec positions, new weight_norm", "speech", positional_conv(nn.utils.parametrizations.weight_norm)),
    Case("HiFi-GAN, old weight_norm", "speech", lambda: (HiFiGAN(), seeded(2, 8, 6)), quick=True),
    Case("TCN, new weight_norm", "speech", lambda: (TCN(), seeded(2, 8, 10))),
    Case("LSTM", "speech", made_recurrent(nn.LSTM, 6)),
    Case("LSTM with projections", "speech", made_recurrent(nn.LSTM, 4, proj_size=4)),
    Case("bidirectional GRU", "speech", made_recurrent(nn.GRU, 12, bidirectional=True, num_layers=2)),
    Case("Elman RNN", "speech", made_recurrent(nn.RNN, 6, nonlinearity="relu")),
]

# --- state spaces ---------------------------------------------------------------------------------------


class Mamba(nn.Module):
    """A selective scan: `in_proj` makes x and a gate, A is a logarithm of three axes' worth of rates."""

    def __init__(self, dim: int = 8, inner: int = 16, state: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, 2 + 2 * state, bias=False), nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).repeat(inner, 1).log())
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([2, self.state, self.state], dim=-1)
        dt, a = F.softplus(self.dt_proj(dt)), -self.A_log.exp()
        h, ys = torch.zeros_like(u[:, 0, :, None] * a), []
        for t in range(x.shape[1]):
            h = h * (dt[:, t, :, None] * a).exp() + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return x + self.out_proj((torch.stack(ys, 1) + u * self.D) * F.silu(z))


class S4D(nn.Module):
    """A diagonal state space with complex parameters."""

    def __init__(self, dim: int = 8, state: int = 4) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(dim, state))
        self.frequency = nn.Parameter(torch.arange(float(state)).repeat(dim, 1))
        self.C = nn.Parameter(torch.randn(dim, state, dtype=torch.complex128))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        exponent = torch.complex(-self.log_rate.exp(), self.frequency)
        kernel = (self.C[..., None] * (exponent[..., None] * torch.arange(length)).exp()).sum(1).real.to(x)
        spectrum = torch.fft.rfft(kernel, 2 * length) * torch.fft.rfft(x.transpose(1, 2), 2 * length)
        return self.out(torch.fft.irfft(spectrum)[..., :length].transpose(1, 2))


class LinearAttention(nn.Module):
    """RWKV-like: mixes with the step before, decays per channel."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.time_mix_k = nn.Parameter(torch.rand(1, 1, dim))
        self.time_decay = nn.Parameter(torch.linspace(-5, 3, dim))
        self.key, self.value, self.receptance = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        mixed = y * self.time_mix_k + F.pad(y, (0, 0, 1, -1)) * (1 - self.time_mix_k)
        k, v, r = self.key(mixed), self.value(mixed), self.receptance(y)
        state, outs = torch.zeros_like(k[:, 0]), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-self.time_decay.exp()) + k[:, t].exp() * v[:, t]
            outs.append(torch.sigmoid(r[:, t]) * state)
        return x + self.output(torch.stack(outs, 1))


STATES = [
    Case("Mamba block", "state space", lambda: (Mamba(), frames(5)), quick=True),
    Case("S4D with complex parameters", "state space", lambda: (S4D(), frames(6)), quick=True),
    Case("RWKV-like block", "state space", lambda: (LinearAttention(), frames(5))),
]

# --- experts --------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Experts as one tensor (experts, in, out), chosen by a router."""

    def __init__(self, dim: int = 8, inner: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, dim, 2 * inner) * dim**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, inner, dim) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        gate, up = torch.einsum("bd,edf->bef", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("bef,efd,be->bd", F.silu(gate) * up, self.down_proj, share)


class ExpertList(nn.Module):
    """Experts as layers in a list; those of no token do not run."""

    def __init__(self, dim: int = 8, experts: int = 4, *, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 12), nn.ReLU(), nn.Linear(12, dim)) for _ in range(experts)
        )
        self.shared = nn.Linear(dim, dim) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        y = torch.zeros_like(x) if self.shared is None else self.shared(x)
        for index, expert in enumerate(self.experts):
            at = (best == index).nonzero()[:, 0]
            if len(at):
                y = y.index_add(0, at, expert(x[at]))
        return y


EXPERTS = [
    Case("experts in one tensor", "experts", lambda: (Experts(), vectors()), quick=True),
    Case("experts in a list", "experts", lambda: (ExpertList(), vectors())),
    Case("experts in a list beside a shared one", "experts", lambda: (ExpertList(shared=True), vectors())),
]

# --- reinforcement learning -----------------------------------------------------------------------------


class NoisyLinear(nn.Module):
    """Rainbow's: means, deviations and noise in buffers."""

    def __init__(self, features_in: int, features: int) -> None:
        super().__init__()
        self.weight_mu = nn.Parameter(torch.empty(features, features_in).uniform_(-0.3, 0.3))
        self.weight_sigma = nn.Parameter(torch.full((features, features_in), 0.1))
        self.register_buffer("weight_epsilon", torch.randn(features, features_in))
        self.bias_mu = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_mu + self.weight_sigma * self.weight_epsilon if self.training else self.weight_mu
        return F.linear(x, weight, self.bias_mu)


class ActorCritic(nn.Module):
    """Two heads on one trunk; orthogonal with the usual gains, the policy's 0.01."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 4), nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(4))
        for layer, gain in ((self.trunk[0], 2**0.5), (self.trunk[2], 2**0.5), (self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.trunk(x)
        return self.policy(y), self.log_std.expand(len(x), 4), self.value(y)


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(2, 8, 3, 2), nn.ReLU(), nn.Flatten())
        self.advantage = nn.Sequential(NoisyLinear(72, 8), nn.ReLU(), NoisyLinear(8, 3))
        self.value = nn.Sequential(NoisyLinear(72, 8), nn.ReLU(), NoisyLinear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x / 255)
        advantage = self.advantage(y)
        return self.value(y) + advantage - advantage.mean(1, keepdim=True)


class Ensemble(nn.Module):
    """Several critics in one batched weight (critics, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(3, 8, 16) / 8**0.5)
        self.weight2 = nn.Parameter(torch.randn(3, 16, 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.expand(3, -1, -1).bmm(self.weight1)).bmm(self.weight2)


class TwoCritics(nn.Module):
    """A critic and its frozen target copy."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.target = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(x) - self.target(x)


RL = [
    Case("actor and critic", "RL", lambda: (ActorCritic(), vectors()), quick=True),
    Case("dueling heads with noise", "RL", lambda: (Dueling(), seeded(2, 2, 8, 8))),
    Case("ensemble in one tensor", "RL", lambda: (Ensemble(), vectors())),
    Case("critic and frozen target", "RL", lambda: (TwoCritics(), vectors())),
]

CASES = [*SPEECH, *STATES, *EXPERTS, *RL]
