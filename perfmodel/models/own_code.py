"""Running code of the user's own: where its modules are looked for, and its failures as one sentence."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from perfmodel.errors import PerfModelError, Terminated

LONGEST_MESSAGE = 300  # characters of an error's own text
MOST_FRAMES = 4
_CHECKOUT = Path(__file__).resolve().parents[2]
_NOT_OWN = tuple(
    f"{path}/"
    for path in (
        *(_CHECKOUT / name for name in ("perfmodel", "calibrate", "validate")),
        Path(torch.__file__).resolve().parent,
        Path(sysconfig.get_path("stdlib")).resolve(),
    )
)
_INSTALLED = tuple({f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("purelib", "platlib")})


@contextmanager
def importing_from(folder: Path | None) -> Iterator[None]:
    """Look for modules in ``folder`` first, as Python does in that of a script."""
    if folder is None:
        yield
        return
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have taken it off the path itself
            sys.path.remove(str(folder))


@contextmanager
def own_code(rule: Callable[[], str], remedy: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn whatever the user's code raises, and its exit, into a :class:`PerfModelError` with the user's own frames.

    What the code prints goes to stderr: stdout may be read by a program; closing them closes neither. Ctrl-C and
    SIGTERM pass, and where :func:`out_of_memory_passes` also running out of device memory.

    Parameters
    ----------
    rule : callable
        Gives what must hold, for example ``model.target: nets:Net must build``; called only after a failure.
    remedy : callable
        Gives what to do about the exception.

    Raises
    ------
    PerfModelError
        ``rule (got what was raised, where). remedy``; one that was raised inside keeps its sentence, and says where.
    """
    kept_open = None if sys.stderr is None else cast("TextIO", _KeptOpen(sys.stderr))
    try:
        with redirect_stdout(kept_open), redirect_stderr(kept_open), _no_log_of_fake_tensors():
            yield
    except PerfModelError as error:
        frames = own_frames(error)
        if not frames:
            raise
        raise PerfModelError(f"{error} (At {frames}.)") from error
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError) and _out_of_memory_passes.get():
            raise
        raise PerfModelError(f"{rule()} (got {what_was_raised(error)}). {remedy(error)}") from error


_out_of_memory_passes = ContextVar("out_of_memory_passes", default=False)


@contextmanager
def out_of_memory_passes() -> Iterator[None]:
    """Let :func:`own_code` pass ``torch.OutOfMemoryError``, where steps run on the device and the caller handles it."""
    before = _out_of_memory_passes.set(True)
    try:
        yield
    finally:
        _out_of_memory_passes.reset(before)


class _KeptOpen:
    """A stream that the user's code can write to, and cannot close: not itself, and not through its buffer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _KeptOpen:
        return self

    def __exit__(self, *raised: object) -> None:
        self.flush()

    def close(self) -> None:
        self.flush()

    @property
    def buffer(self) -> Any:
        """Return a handle of its own, since whoever wraps the buffer in another text stream closes it with that."""
        try:
            return os.fdopen(os.dup(self._stream.fileno()), "wb", buffering=0)
        except (AttributeError, OSError):  # of streams in memory
            return self._stream.buffer

    def detach(self) -> Any:
        return self.buffer


@contextmanager
def _no_log_of_fake_tensors() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that is then reported in one sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def what_was_raised(error: BaseException) -> str:
    """Return type and text of an exception, the module whose forward raised it, and the user's own frames."""
    text = " ".join(text_of(error).split())
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE - 3]}..."
    kind = type(error).__name__
    clauses = [f"{kind}: {text.rstrip('.')}" if text else kind]
    inside = _module_at_work(error.__traceback__)
    if inside:
        clauses.append(f"in {inside}")
    frames = own_frames(error)
    if frames:
        clauses.append(f"at {frames}")
    return ", ".join(clauses)


def text_of(error: BaseException) -> str:
    """Return the exception's own text; empty if its class fails to give one."""
    try:
        return str(error)
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException:
        return ""


def own_frames(error: BaseException) -> str:
    """Return the frames of the user's own code, innermost first: ``nets.py:12 in forward, from nets.py:30 in loss``.

    Frames of torch, of Python's library and of this program are left out, and those of installed packages too unless
    there are no others.
    """
    frames = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_code = not frame.filename.startswith("<")
        if is_code and not _lies_in(frame.filename, _NOT_OWN, but=_INSTALLED):
            frames.append(frame)
    own = [frame for frame in frames if not _lies_in(frame.filename, _INSTALLED)] or frames
    shown = [f"{_shown_path(frame.filename)}:{frame.lineno} in {frame.name}" for frame in own[:MOST_FRAMES]]
    return ", from ".join([*shown, "..."] if len(own) > MOST_FRAMES else shown)


def lacks_fake_implementation(error: BaseException) -> bool:
    """Whether an operator failed that torch cannot run on fake tensors, or only as the CPU does."""
    is_of_cpu = '_cpu" not implemented' in text_of(error)  # fake tensors are the CPU's
    if is_of_cpu or isinstance(error, (UnsupportedOperatorException, NotImplementedError)):
        return True
    return any(frame.name == "run_fallback_kernel" for frame in traceback.extract_tb(error.__traceback__))


def _lies_in(filename: str, folders: tuple[str, ...], but: tuple[str, ...] = ()) -> bool:
    """Whether the file lies in one of the folders; the longest match among both lists decides."""
    path = str(Path(filename).resolve())
    inside = max((len(folder) for folder in folders if path.startswith(folder)), default=0)
    outside = max((len(folder) for folder in but if path.startswith(folder)), default=0)
    return inside > outside


def _shown_path(filename: str) -> str:
    """Return the path from the working directory, or for an installed package from where packages are."""
    path = Path(filename)
    folders: list[Path] = [Path.cwd(), *map(Path, _INSTALLED)]
    inside = next((folder for folder in folders if path.is_relative_to(folder)), None)
    return str(path if inside is None else path.relative_to(inside))


def _module_at_work(trace: TracebackType | None) -> str | None:
    """Return the name of the innermost module whose forward was running, as in ``layers.3.mlp (Linear)``."""
    modules: list[nn.Module] = []
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        owner = frame.f_locals.get("self")
        if frame.f_code is nn.Module._call_impl.__code__ and isinstance(owner, nn.Module):
            modules.append(owner)
    if not modules:
        return None
    outermost, innermost = modules[0], modules[-1]
    names = {submodule: name for name, submodule in outermost.named_modules()}
    return f"{names.get(innermost) or 'the model'} ({type(innermost).__name__})"


@contextmanager
def compiled_code_refused(target: str) -> Iterator[None]:
    """Refuse compiled code when it is called: under fake tensors torch would silently run it eagerly.

    Where ``TORCH_COMPILE_DISABLE=1`` or a stance makes torch run it eagerly in earnest too, it passes.

    Raises
    ------
    PerfModelError
        If something that :func:`torch.compile` made is called.
    """
    from torch._dynamo import config, eval_frame

    switch = eval_frame._maybe_set_eval_frame

    def refusing(callback: object) -> object:
        if callable(callback) and not config.disable:
            raise PerfModelError(
                f"model.target: {target} must not run what torch.compile made (it does): compiled steps are not "
                "modelled, and an eager step takes another time. Take torch.compile out, or set TORCH_COMPILE_DISABLE=1"
                " to have the step that torch then runs predicted."
            )
        return switch(callback)

    eval_frame._maybe_set_eval_frame = refusing
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile")  # with the hooks that report modules
            yield
    finally:
        eval_frame._maybe_set_eval_frame = switch
