"""Runs the blocks of documentation pages for `test_docs.py`: each command in a process of its own,
forked from this one, which has loaded the large libraries once. Reads a page a line of standard
input, as JSON, and answers each with its exit status.

A page's Python runs in one process and namespace, in order with the page's commands. A process
behaves as one that was started from a shell: its own folder, environment and `sys.argv`, no thread
and no state of another block.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import shlex
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import IO, Any, NoReturn

import rayrec.commands
import rayrec.recipes

# What commands of the documentation spend most of their start on. Not Ray: only the pages that need
# it load it.
LOADED = """
torch torchrec fbgemm_gpu torch.distributed.fsdp torch.distributed.optim torch.export._trace
torch._inductor.codecache tensorboardX transformers pandas pyarrow.dataset rayrec.training.trainer
rayrec.training.launchers.process_worker rayrec.workloads.recsys.worker
rayrec.workloads.data_parallel.worker
"""
SHELL = set("|&;<>()$`~*?#\n")
"""In a command line, what the shell sees to; those of a line without can be split here."""


def main() -> None:
    for name in LOADED.split():
        importlib.import_module(name)
    for package in (rayrec.commands, rayrec.recipes):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    # a collection writes to all it visits, which would copy the memory that processes share
    gc.freeze()
    requests = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    while line := requests.readline():
        request = json.loads(line)
        page = os.fork()
        if page == 0:
            requests.close()
            answers.close()
            end_after(functools.partial(run_page, **request))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(page, 0)[1])}\n")
        answers.flush()


def end_after(work: Callable[[], None]) -> NoReturn:
    """Ends this forked process with the exit status of `work`, as an interpreter ends: threads are
    waited for and what was registered with `atexit` is called; only modules are not taken apart,
    which takes more than a second.
    """
    status = 1
    try:
        work()
        status = 0
    except SystemExit as error:
        if error.code is None:
            status = 0
        elif isinstance(error.code, int):
            status = error.code
        else:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def run_page(
    name: str, blocks: list[tuple[str, int, str]], folder: str, environment: dict[str, str]
) -> None:
    """Runs the blocks, as a process of its own; standard output and error go to `.out` and `.err`
    in the folder.
    """
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, ".out", os.O_WRONLY),
        (2, ".err", os.O_WRONLY),
    ):
        opened = os.open(path, flags | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    namespace = Namespace(name)
    for kind, line, text in blocks:
        print(f"-- {name}, line {line}", flush=True)
        if kind == "file":
            with open(text.split("\n", 1)[0].removeprefix("# "), "w") as file:
                file.write(text)
        elif kind == "here":  # Changes this process, from which commands are forked
            exec(text, {})
        elif kind == "python":
            namespace.run(line, text)
        else:
            run_command(text)
    namespace.end()
    print("-- done", flush=True)


class Namespace:
    """A process that runs a page's blocks of Python, one after another, in one namespace; it begins
    with the first of them.
    """

    def __init__(self, page: str) -> None:
        self._page = page
        self._pid = 0

    def run(self, line: int, text: str) -> None:
        if not self._pid:
            self._start()
        self._blocks.write(json.dumps([line, text]) + "\n")
        self._blocks.flush()
        if not self._done.readline():
            sys.exit("the block failed")

    def end(self) -> None:
        if self._pid:
            self._blocks.close()
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            if status:
                sys.exit(f"the page's Python ended with exit status {status}")

    def _start(self) -> None:
        blocks, to_run = os.pipe()
        done, is_done = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(to_run)
            os.close(done)
            end_after(lambda: self._serve(os.fdopen(blocks), os.fdopen(is_done, "w")))
        os.close(blocks)
        os.close(is_done)
        self._blocks, self._done = os.fdopen(to_run, "w"), os.fdopen(done)

    def _serve(self, blocks: IO[str], done: IO[str]) -> None:
        sys.path[0] = ""
        sys.argv = ["-c"]
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        namespace: dict[str, Any] = main_module.__dict__
        while asked := blocks.readline():
            line, text = json.loads(asked)
            # A line of a traceback is a line of the page.
            exec(compile("\n" * line + text, self._page, "exec"), namespace)
            done.write("done\n")
            done.flush()


def run_command(line: str) -> None:
    """Runs a line of a bash block; ends this process if it fails."""
    if SHELL & set(line):
        subprocess.run(["sh", "-c", line], check=True)
        return
    command = os.fork()
    if command == 0:
        end_after(lambda: run_here(*shlex.split(line)))
    _, ended, used = os.wait4(command, 0)
    if status := os.waitstatus_to_exitcode(ended):
        sys.exit(f"exit status {status}: {line}")
    print(f"-- CPU {used.ru_utime + used.ru_stime:.1f} s", flush=True)


def run_here(program: str, *arguments: str) -> None:
    """`rayrec`, or `python` and the name of a file."""
    sys.path[0] = os.getcwd()
    if program == "rayrec":
        sys.argv = ["rayrec", *arguments]
        runpy.run_module("rayrec", run_name="__main__", alter_sys=True)
    else:
        assert program == "python", program
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
