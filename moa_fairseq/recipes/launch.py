"""Which devices train, and the command that starts fairseq-train on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

import torch

from ..errors import UsageError

#: torchrun's own default.
DEFAULT_PORT = 29500
#: Volta and later multiply float16 matrices in hardware.
MIXED_PRECISION_CAPABILITY = (7, 0)


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine.

    Attributes:
        count: how many torch sees.
        memory_gib: memory of the smallest in GiB; None without a GPU.
        mixed_precision: whether all of them compute in float16 at full speed.
    """

    count: int
    memory_gib: Optional[float] = None
    mixed_precision: bool = False


def visible_devices() -> Devices:
    """Ask torch."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Devices(0)
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    return Devices(
        count,
        min(device.total_memory for device in properties) / 2**30,
        all((device.major, device.minor) >= MIXED_PRECISION_CAPABILITY for device in properties),
    )


@dataclass(frozen=True)
class Launch:
    """Where a training run happens.

    Attributes:
        gpus: GPUs of each node; 0 for one worker on the CPU.
        nodes: machines.
        master: `HOST` or `HOST:PORT` of the first; None on one machine.
    """

    gpus: int
    nodes: int = 1
    master: Optional[str] = None

    @property
    def num_workers(self) -> int:
        """Processes that train together, over all nodes."""
        return max(1, self.gpus) * self.nodes

    def command(self, train_options: Sequence[str], node_rank: int = 0) -> List[str]:
        """The words of the command that this node runs.

        Args:
            train_options: arguments of fairseq-train; --distributed-world-size must be among
                them, because on a node with one GPU fairseq would not read torchrun's variables.
            node_rank: number of this node, from 0.
        """
        if self.num_workers == 1:
            return ["fairseq-train", *train_options]
        # --standalone finds a free port, so that two runs on one machine do not meet.
        where = ["--standalone"]
        if self.master is not None and self.nodes > 1:
            host, port = split_address(self.master)
            where = [
                *("--nnodes", str(self.nodes), "--node-rank", str(node_rank)),
                *("--master-addr", host, "--master-port", str(port)),
            ]
        return [
            *("torchrun", *where, "--nproc-per-node", str(self.gpus)),
            *("--no-python", "fairseq-train", *train_options),
        ]


def split_address(master: str) -> tuple[str, int]:
    """Host and port of `HOST` or `HOST:PORT`.

    Raises:
        UsageError: where the port is none.
    """
    host, colon, port = master.partition(":")
    if not host or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise UsageError(f"--master {master}: give HOST or HOST:PORT, such as node1:29500")
    return host, int(port) if colon else DEFAULT_PORT


def choose_launch(
    devices: Devices, gpus: Optional[int], nodes: int, master: Optional[str], pretend: bool
) -> Launch:
    """Settle on GPUs and nodes.

    Args:
        devices: what this machine has.
        gpus: GPUs of each node that the user asks for; None for all of this machine.
        nodes: number of machines.
        master: address of the first; needed for several.
        pretend: nothing will run, so that GPUs need not be here.

    Raises:
        UsageError: for what cannot run, naming flag, value and remedy.
    """
    if gpus is not None and gpus < 1:
        raise UsageError(
            f"--gpus {gpus}: give a number from 1 on; without the option all GPUs are used, and "
            "the CPU where there is none"
        )
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: give a number from 1 on")
    if gpus is not None and gpus > devices.count and not pretend:
        raise UsageError(
            f"--gpus {gpus}: torch sees {devices.count} on this machine; lower it, or leave it out"
        )
    wanted = devices.count if gpus is None else gpus
    if nodes > 1 and wanted == 0:
        raise UsageError(f"--nodes {nodes}: torch sees no GPU on this machine; several need GPUs")
    if nodes > 1 and master is None:
        raise UsageError(f"--nodes {nodes} needs --master HOST[:PORT], the address of the first")
    if master is not None:
        split_address(master)
    return Launch(wanted, nodes, master)
