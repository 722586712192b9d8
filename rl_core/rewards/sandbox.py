"""Runs a program written by a model where it reaches neither files nor processes nor networks of the machine.

A script for `python -I -S`; it imports nothing from the project. Usage:

    sandbox.py ISOLATION FILTER PARENT CPU_S PROGRAM REPORT [TESTS PASSED]

ISOLATION is `namespaces` or `none`, FILTER the filter of system calls (hexadecimal), PARENT the caller's process id;
the last four are descriptors of files. REPORT receives `started` and `exit CODE`, or `refused REASON` if the program
could not be locked in and was not run. With TESTS the program is imported, and PASSED receives a line for each test
that passed; otherwise the program runs as main module.

Processes: this one waits outside; the first process of the PID namespace is trusted, cannot be inspected, and ends all
others with it; its child runs the program.
"""

import ctypes
import importlib
import marshal
import os
import resource
import select
import signal
import site
import struct
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NAMESPACES, STARTED = "namespaces", b"started\n"
PROGRAM, FOLDER = "program.py", "/program"
GIB, MIB = 1 << 30, 1 << 20
MEMORY, TOTAL_MEMORY, FILE_SIZE, DISK, INODES, PROCESSES, FILES = GIB, 2 * GIB, MIB, 64 * MIB, 4096, 64, 256
"""Limits in bytes of a process's address space, the resident memory of all, a file, and all files together (in memory);
then the number of files and folders, of processes and threads, and of open descriptors of a process."""
WATCH_S = 0.05
"""Interval at which the memory of all processes is added up."""
INSIDE, UNPRIVILEGED = 1000, 65534
"""User and group of the program, inside and, if the caller is root, outside of its user namespace."""
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, PID, mounts, network, IPC, UTS."""
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 8, 4096, 16384, 1 << 18, 2
DEATH_SIGNAL, DUMPABLE, SECCOMP, BOUNDED, DROP_BOUNDED, NO_NEW_PRIVILEGES = 1, 4, 22, 23, 24, 38
MOUNT_SETATTR, THIS_FOLDER = 442, -100
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
INTERPRETER = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
ROOT = "/tmp"
"""Any folder: in this mount namespace the new root is mounted there."""
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def main(isolation: str, rules: bytes, parent: int, cpu_s: int, program: int, report: int, *more: int) -> int:
    """Returns the program's exit code in its own process, and an exit code without meaning in the others."""
    with _refusal(report):
        _die_with(parent)
        os.umask(0o022)
        _set_paths()
        source = _content(program)
        if isolation == NAMESPACES:
            _enter_namespaces()
            if not _is_first_process():
                return 0
            _enter_root()
        with open(PROGRAM, "wb") as file:
            file.write(source)
        messages, answers = os.pipe(), os.pipe()
        pid = os.fork()
    if pid:
        os.close(messages[1])
        os.close(answers[0])
        with _refusal(report):
            return _supervise(pid, messages[0], answers[1], report, more[0] if more else None, isolation == NAMESPACES)
    with _refusal(messages[1]):
        _keep_descriptors({0, 1, 2, messages[1], *((answers[0], more[1]) if more else ())})
        _lock_in(isolation, rules, cpu_s)
        os.write(messages[1], STARTED)
    sys.argv[:] = sys.orig_argv[:] = [PROGRAM]
    if more:
        _test(messages[1], answers[0], more[1])
    else:
        os.close(messages[1])
        _run()
    return 0


@contextmanager
def _refusal(report: int) -> Iterator[None]:
    """Reports an error and ends the process: without its limits the program does not run."""
    try:
        yield
    except Exception as error:
        os.write(report, f"refused {error}".encode())
        os._exit(1)


def _check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(f"{call}: {os.strerror(ctypes.get_errno())}")


def _content(file: int) -> bytes:
    parts, size = [], 0
    while part := os.pread(file, MIB, size):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _die_with(parent: int) -> None:
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills the program and not the training


def _set_paths() -> None:
    """Sets paths and builtins as without `-S`, but reads no `.pth` file: they take most of an interpreter's start, and
    point out of the sandbox."""
    site.addpackage = lambda *_: None
    site.main()


def _enter_namespaces() -> None:
    """Moves this process into new namespaces; a process outside maps the ids, as only there root may map a second one.

    The PID namespace begins with the next child.
    """
    with suppress(PermissionError):
        os.setgroups([])
    begin = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(begin[1])
        if os.read(begin[0], 1):
            with suppress(OSError):
                _map_ids(os.getppid())
                os._exit(0)
        os._exit(1)
    os.close(begin[0])
    _check(LIBC.unshare(NEW_NAMESPACES), "unshare")
    os.write(begin[1], b"1")
    os.close(begin[1])
    if os.waitpid(helper, 0)[1]:
        raise OSError("the user cannot be mapped into a user namespace")
    _check(LIBC.prctl(DUMPABLE, 0, 0, 0, 0), "prctl")  # also holds for children: none can be inspected


def _map_ids(pid: int) -> None:
    """Maps root to itself and the program's user to an unprivileged one, because limits do not bind root; an ordinary
    user, and a root that has no second id, to the program's user."""
    with open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        single, double = f"{INSIDE} {own} 1", f"0 {own} 1\n{INSIDE} {UNPRIVILEGED} 1"
        for text in (double, single) if os.geteuid() == 0 else (single,):
            with suppress(PermissionError), open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
                file.flush()
                break
        else:
            raise PermissionError(name)


def _is_first_process() -> bool:
    """True in a new child, which ends with this process; False here, once it has ended."""
    alive = os.pipe()
    if child := os.fork():
        os.close(alive[0])
        os.waitpid(child, 0)
        return False
    os.close(alive[1])
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if select.select([alive[0]], [], [], 0)[0]:  # the parent, invisible from here, has ended before
        os._exit(1)
    os.close(alive[0])
    return True


def _enter_root() -> None:
    """Changes to a root that has system and interpreter, read-only, and one bounded tmpfs to write in."""
    LIBC.sethostname(b"program", 7)
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in _read_only_paths()}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    _mount("tmpfs", ROOT, "tmpfs", NO_SUID | NO_DEVICES, f"size={DISK},nr_inodes={INODES},mode=755")
    for path, file in (opened | devices).items():
        _bind(file, ROOT + path, READ_ONLY | NO_SUID | (NO_DEVICES if path in opened else NO_EXEC))
        os.close(file)
    for folder in (FOLDER, "/tmp", "/dev/shm"):
        os.makedirs(ROOT + folder, exist_ok=True)
        os.chown(ROOT + folder, INSIDE, INSIDE)
    os.mkdir(ROOT + "/proc")
    with suppress(OSError):  # refused in a container that hides parts of its own; then the program has none
        _mount("proc", ROOT + "/proc", "proc", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, "subset=pid")
    for name, target in LINKS.items():
        os.symlink(f"/proc/self/fd{target}", f"{ROOT}/dev/{name}")
    os.chdir(ROOT)
    _check(LIBC.pivot_root(b".", b"."), "pivot_root")  # puts the old root on top of the new one
    _check(LIBC.umount2(b".", DETACH), "umount2")
    os.chdir(FOLDER)


def _read_only_paths() -> list[str]:
    """Existing paths of system and interpreter, none of them below another."""
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    wanted = {*SYSTEM, *(os.path.join(prefix, name) for prefix in prefixes for name in INTERPRETER)}
    chosen: list[str] = []
    for path in sorted(wanted):
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return chosen


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    _check(LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _bind(file: int, target: str, attributes: int) -> None:
    """Makes an opened file or folder visible at the target, which must not exist."""
    if os.path.isdir(f"/proc/self/fd/{file}"):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))
    _mount(f"/proc/self/fd/{file}", target, None, BIND | RECURSIVE)
    values = (ctypes.c_uint64 * 4)(attributes)
    size = ctypes.c_size_t(ctypes.sizeof(values))
    done = LIBC.syscall(MOUNT_SETATTR, THIS_FOLDER, target.encode(), 0x8000, ctypes.byref(values), size)
    _check(done, f"mount_setattr {target}")


def _keep_descriptors(kept: set[int]) -> None:
    """Closes all others."""
    begin = 0
    for file in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        if begin < file:  # an empty range would close all
            os.closerange(begin, file)
        begin = file + 1


def _lock_in(isolation: str, rules: bytes, cpu_s: int) -> None:
    """Takes all rights from this process, for good."""
    os.setsid()
    if isolation == NAMESPACES:
        for capability in range(64):
            if LIBC.prctl(BOUNDED, capability, 0, 0, 0) == 1:
                _check(LIBC.prctl(DROP_BOUNDED, capability, 0, 0, 0), "prctl")
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(LIBC.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))
    _check(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    code = ctypes.create_string_buffer(rules)
    passed = ctypes.create_string_buffer(struct.pack("@HP", len(rules) // 8, ctypes.addressof(code)))
    _check(LIBC.prctl(SECCOMP, 2, ctypes.addressof(passed), 0, 0), "seccomp")


def _supervise(program: int, messages: int, answers: int, report: int, tests: int | None, watched: bool) -> int:
    """Waits for the program, hands out its tests once it has run, and ends it if all processes use too much memory."""
    # Python's handler goes: the first process gets no signal from inside that it has no handler for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended, started, pending = os.pidfd_open(program), False, b""
    listening = [messages]
    while True:
        readable, writable, _ = select.select([ended, *listening], [answers] if pending else [], [], WATCH_S)
        if messages in readable or (ended in readable and not started):
            message = os.read(messages, len(STARTED))
            if not started:
                started = message == STARTED
                os.write(report, message if started else message + os.read(messages, 4096))
            else:
                listening = []
                pending = _content(tests) if tests is not None and message else b""
        if writable:
            os.set_blocking(answers, False)
            try:
                pending = pending[os.write(answers, pending) :]
            except BrokenPipeError:
                pending = b""
            if not pending:
                os.close(answers)
        if (code := _exit_code(program)) is not None:
            os.write(report, f"exit {code}\n".encode())
            return 0
        if watched and _memory() > TOTAL_MEMORY:
            return 0


def _exit_code(program: int) -> int | None:
    """Exit code of the program, None while it runs; also takes leave of orphans, which count as processes."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _memory() -> int:
    """Resident bytes of all processes of the namespace; 0 without /proc."""
    pages = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _run() -> None:
    """Runs the program as main module; runpy would take longer to load."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = PROGRAM
    with open(PROGRAM, "rb") as file:
        source = file.read()
    exec(compile(source, PROGRAM, "exec"), vars(module))


def _test(messages: int, answers: int, passed: int) -> None:
    """Imports the program, then requests and runs the tests; they share its process, so it can influence them."""
    sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module(PROGRAM.removesuffix(".py")))
    os.write(messages, b"tests")
    with open(answers, "rb") as file:
        secret, tests = marshal.load(file)
    for number, test in enumerate(tests):
        with suppress(Exception):
            exec(compile(test, f"test {number}", "exec"), names)
            os.write(passed, f"{secret} {number}\n".encode())


if __name__ == "__main__":
    ARGUMENTS = sys.argv[1:]
    sys.exit(main(ARGUMENTS[0], bytes.fromhex(ARGUMENTS[1]), *map(int, ARGUMENTS[2:])))
