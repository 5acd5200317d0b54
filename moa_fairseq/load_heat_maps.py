"""Heat maps of expert load while a model trains, for criterions with `--load-heat-map-interval`.

Importing this module makes fairseq's trainer draw them where its criterion asks. They are made of
the sums that the criterion logs, after fairseq has gathered these from all batches of an update
and all workers: nothing is computed or sent for them.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from torch import Tensor

from .analysis.load_heat_map import load_figure
from .analysis.plots import require_matplotlib
from .errors import UsageError
from .modules.recording import ROUTED_KINDS, routed_modules
from .text.files import atomic_writer

FLAG = "--load-heat-map-interval"
FOLDER = "load_heat_maps"
#: Its lines: `from_update`, `to_update`, and by module the selections of each expert.
NUMBERS = "load.jsonl"

Draw = Callable[[Any, int], None]


class LoadHeatMaps:
    """Sums the load of experts, and draws it at every N-th update.

    Args:
        interval: N.
        modules: how many experts each module has, by its name here.
        save_dir: fairseq's, for pictures and numbers; None where nothing is saved.
        draw: what else shows a picture: called with a figure and the number of updates.
    """

    def __init__(
        self,
        interval: int,
        modules: Dict[str, int],
        save_dir: Optional[Path],
        draw: Sequence[Draw] = (),
    ) -> None:
        self.interval, self.modules, self.draw = interval, modules, draw
        self.folder = None if save_dir is None else save_dir / FOLDER
        self._sums: Dict[str, Tensor] = {}
        self._from_update: Optional[int] = None

    def add(self, logging_outputs: Sequence[Dict[str, Any]], update: int) -> None:
        """Count an update, and draw where it is an N-th one.

        Args:
            logging_outputs: of the criterion, for all batches of the update.
            update: its number, from 1.
        """
        if self._from_update is None:
            self._from_update = update
            self._forget_from(update)
        for output in logging_outputs:
            for name in self.modules:
                # float64: a sum over many updates leaves float32's whole numbers.
                counts = output[_statistic(name)].detach().double()
                self._sums[name] = self._sums[name] + counts if name in self._sums else counts
        if update % self.interval == 0:
            self._write(self._from_update, update)
            self._sums, self._from_update = {}, update + 1

    def _forget_from(self, update: int) -> None:
        """Remove what an earlier run drew of updates that are trained again after a resumption."""
        if self.folder is None or not (self.folder / NUMBERS).exists():
            return
        kept = []
        for line in (self.folder / NUMBERS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the last line of a run that was killed may be cut short
                if json.loads(line)["to_update"] < update:
                    kept.append(line + "\n")
        with atomic_writer(self.folder / NUMBERS) as stream:
            stream.writelines(kept)
        for path in self.folder.glob("*.png"):
            if path.stem.isdecimal() and int(path.stem) >= update:
                path.unlink()

    def _write(self, first: int, last: int) -> None:
        zero = {name: torch.zeros(experts) for name, experts in self.modules.items()}
        counts: Dict[str, List[int]] = {
            name: [round(value) for value in self._sums.get(name, zero[name]).tolist()]
            for name in self.modules
        }
        figure = load_figure(counts, f"expert load in training, updates {first} to {last}")
        for draw in self.draw:
            draw(figure, last)
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_writer(self.folder / f"{last:06d}.png", "wb") as stream:
            figure.savefig(stream, format="png", dpi=110)
        # A module without a token has no load.
        loads = {name: row if any(row) else None for name, row in counts.items()}
        line = {"from_update": first, "to_update": last, "modules": loads}
        with open(self.folder / NUMBERS, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def _statistic(name: str) -> str:
    """What `router_terms.py` calls the sums of a module."""
    kind, _, position = name.rpartition(" ")
    return f"_load_{kind}_{position}"


def load_heat_maps_of(trainer: Any) -> Optional[LoadHeatMaps]:
    """The heat maps that a trainer's criterion asks for; None for none, or in a later worker.

    Raises:
        UsageError: where they could not be drawn, or shown nowhere.
    """
    interval = getattr(trainer.get_criterion(), "load_heat_map_interval", 0)
    if not interval:
        return None
    modules = {
        f"{module.kind} {position}": module.num_experts
        for _, position, module in routed_modules(trainer.get_model())
    }
    if not modules:
        raise UsageError(
            f"{FLAG} {interval}: the model has no experts; leave the option out, or train a MoA "
            "architecture"
        )
    cfg = trainer.cfg
    draw: List[Draw] = []
    if cfg.common.tensorboard_logdir and progress_bar.SummaryWriter is not None:
        draw.append(functools.partial(_to_tensorboard, cfg.common.tensorboard_logdir))
    if cfg.common.wandb_project and progress_bar.wandb is not None:
        draw.append(_to_wandb)
    save_dir = None if cfg.checkpoint.no_save else Path(cfg.checkpoint.save_dir)
    if save_dir is None and not draw:
        raise UsageError(
            f"{FLAG} {interval}: with --no-save there is no place to draw to; leave that out, or "
            "give --tensorboard-logdir or --wandb-project (and install what they need)"
        )
    require_matplotlib(f"{FLAG} {interval}")
    if not trainer.is_data_parallel_master:
        return None
    ordered = sorted(modules, key=lambda name: ROUTED_KINDS.index(name.rpartition(" ")[0]))
    return LoadHeatMaps(interval, {name: modules[name] for name in ordered}, save_dir, draw)


def _to_tensorboard(folder: str, figure: Any, update: int) -> None:
    # The same file as that of the scalars of these updates.
    writer = progress_bar.TensorboardProgressBarWrapper(None, folder)._writer("train_inner")
    writer.add_image("load_heat_map", _pixels(figure), update, dataformats="HWC")
    writer.flush()


def _to_wandb(figure: Any, update: int) -> None:
    wandb = progress_bar.wandb
    wandb.log({"load_heat_map": wandb.Image(_pixels(figure))}, step=update)


def _pixels(figure: Any) -> Any:
    """`[height, width, 3]` bytes."""
    figure.canvas.draw()
    return (
        torch.as_tensor(bytearray(figure.canvas.buffer_rgba()), dtype=torch.uint8)
        .reshape(*figure.canvas.get_width_height()[::-1], 4)[..., :3]
        .numpy()
    )


def draw_loads() -> None:
    """Let fairseq's trainer draw what its criterion asks for."""
    original_init, original_log = Trainer.__init__, Trainer._reduce_and_log_stats
    if getattr(original_init, "draws_loads", False):
        return

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self._load_heat_maps = load_heat_maps_of(self)

    @functools.wraps(original_log)
    def _reduce_and_log_stats(self: Any, logging_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        maps = getattr(self, "_load_heat_maps", None)  # a trainer from before this module
        # Validation comes here too.
        if maps is not None and self.criterion.training:
            maps.add(logging_outputs, self.get_num_updates())
        return original_log(self, logging_outputs, *args, **kwargs)

    __init__.draws_loads = True  # type: ignore[attr-defined]
    Trainer.__init__ = __init__
    Trainer._reduce_and_log_stats = _reduce_and_log_stats


draw_loads()
