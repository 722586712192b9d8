"""Programs that attack the machine from inside the sandbox, started by this user, by an ordinary user, and by one in a
container that hides parts of /proc."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.errors import InputError
from rl_core.rewards import programs, sandbox, seccomp
from rl_core.rewards.code import code

SYSTEM_PYTHON = "/usr/bin/python3"
"""An interpreter that every user can read; this one may lie in a home folder."""
USER = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"] if os.geteuid() == 0 else []
MASKED = 'mount --bind /dev/null /proc/cmdline && exec unshare -U --map-user 1000 --map-group 1000 "$@"'
CONTAINER = ["unshare", "-Urm", "sh", "-c", MASKED, "sh"]
CALLERS = {"self": [], "user": USER, "container": [*USER, *CONTAINER]}
PROC = "import os\nimport glob\ndef opened(name, mode):\n    try:\n        return open(name, mode)\n"
PROC += "    except OSError:\n        return None\n"


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "self":
        if not os.path.exists(SYSTEM_PYTHON):
            pytest.skip(f"{SYSTEM_PYTHON} does not exist")
        prefix, command = CALLERS[request.param], programs._command
        monkeypatch.setattr(programs, "_command", lambda *of: [*prefix, SYSTEM_PYTHON, *command(*of)[1:]])
    return str(request.param)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may read and write."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def share(program: str, *tests: str, **more: Any) -> float:
    truth = json.dumps({"tests": tests, "timeout_s": 20, **more})
    row = {"data_source": "code", "reward_model": {"ground_truth": truth}}
    return code(f"```python\n{program}\n```", row)["tests_passed"]


def printed(program: str, seconds: float = 60) -> str:
    ended = programs.run_program(program, time.monotonic() + seconds)
    assert ended.succeeded, ended.output
    return ended.output.rstrip("\n")


def test_it_has_no_rights_and_no_root_user(caller: str) -> None:
    text = printed(f"import ctypes, os\nprint(os.getuid(), os.getgid(), os.getgroups()[1:])\n{FLAGS}")
    identity, flags = text.splitlines()
    assert identity.startswith("1000 1000") and flags == "1 2 0 0 0 0"
    if caller != "container":
        status = dict(line.split(":\t") for line in printed("print(open('/proc/self/status').read())").splitlines())
        assert [int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
        assert (status["NoNewPrivs"], status["Seccomp"], status["Pid"]) == ("1", "2", "2")


FLAGS = """libc = ctypes.CDLL(None)
head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(head, sets)
bounds = [cap for cap in range(64) if libc.prctl(23, cap, 0, 0, 0) == 1]
print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), len(bounds), *sets[:3])"""
"""Prints no_new_privs, the seccomp mode, the size of the bounding set, and some of the capabilities."""


def test_it_sees_no_other_process_and_cannot_inspect_its_own_supervisor(caller: str) -> None:
    holder = subprocess.Popen([*CALLERS[caller], "sleep", "30"], env={"PATH": os.defpath, "SECRET_KEY": "hunter2"})
    try:
        look = "for each in glob.glob('/proc/[0-9]*'):\n    if int(each[6:]) != os.getpid():\n        "
        look += "print([opened(f'{each}/mem', 'r+b'), opened(f'{each}/environ', 'rb'), opened(f'{each}/maps', 'rb')])"
        assert set(printed(f"{PROC}{look}").splitlines()) <= {"[None, None, None]"}
        pids = [os.getpid(), holder.pid]
        for pid in pids:
            assert share("import os", f"os.kill({pid}, 0)") == 0.0
        calls = f"import ctypes\nlibc = ctypes.CDLL(None)\nprint([libc.ptrace(16, pid, 0, 0) for pid in (1, *{pids})])"
        assert printed(calls) == "[-1, -1, -1]"
    finally:
        holder.kill()
        holder.wait()


LEAVES = """import contextlib, ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal when its parent ends
with contextlib.suppress(OSError):
    os.setsid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "97.6"])
    os._exit(0)
time.sleep(0.2)
"""


@pytest.mark.parametrize("end", ["", "time.sleep(30)"])
def test_nothing_outlives_it(caller: str, end: str) -> None:
    programs.run_program(f"{LEAVES}{end}", time.monotonic() + 1.5)
    deadline = time.monotonic() + 30
    while (left := sleepers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def sleepers() -> list[int]:
    return [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "97.6"]]


def test_it_reaches_no_files_of_the_machine(caller: str, shared: Path) -> None:
    answers, scorer, memory = shared / "answers.parquet", shared / "my_rewards.py", Path("/dev/shm") / shared.name
    files, own = (answers, scorer, memory), str(Path(__file__).parents[2] / "rl_core")
    for file in files:
        file.write_text("42")
        file.chmod(0o666)
    try:
        reads = (
            f"{PROC}paths = {list(map(str, files))}\nroots = ['', '/proc/1/root', '/proc/self/root', '/..', '../..']\n"
        )
        reads += "print([opened(root + path, 'r') for root in roots for path in paths])\n"
        assert printed(
            f"{reads}print([os.path.exists(path) for path in ({own!r}, '/etc/passwd', '/var', '/home')])"
        ) == (f"{[None] * 15}\n{[False] * 4}")
        # It may make files of these names below its own root.
        printed(f"{reads}print([opened(root + path, 'a') for root in roots for path in paths])")
        assert [file.read_text() for file in files] == ["42"] * 3
    finally:
        memory.unlink()


def test_the_system_is_read_only(caller: str) -> None:
    program = (
        f"import sys\n{PROC}print(opened('/usr/x', 'w'), opened(sys.prefix + '/lib/x', 'w'), opened(os.__file__, 'a'))"
    )
    assert printed(program) == "None None None"
    assert printed("import os\nprint(os.statvfs('/usr').f_flag & 3, os.statvfs(os.__file__).f_flag & 3)") == "3 3"


def test_it_reaches_neither_network_nor_sockets(caller: str, shared: Path) -> None:
    name = str(shared / "socket")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as path, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        path.bind(name)
        os.chmod(name, 0o777)
        abstract.bind(f"\0{name}")
        for each in (tcp, path, abstract):
            each.listen()
        to = [("AF_INET", tcp.getsockname()), ("AF_UNIX", name), ("AF_UNIX", f"\0{name}")]
        program = (
            f"import socket\nfor family, address in {to}:\n    each = socket.socket(getattr(socket, family))\n    "
        )
        program += "print(each.connect_ex(address) != 0)"
        assert printed(program).split() == ["True"] * 3
    assert printed("import socket; print(socket.gethostname())") == "program"


FORKS = """import os, time
number = 0
try:
    while number < 150:
        if os.fork() == 0:
            time.sleep(30)
        number += 1
except OSError:
    pass
print(number)"""


def test_processes_are_limited(caller: str) -> None:
    assert 32 < int(printed(FORKS)) < sandbox.PROCESSES


FILLS = """size = 0
try:
    for number in range(300):
        with open(f"{folder}/{number}", "wb", 0) as file:
            size += file.write(bytes(1 << 20))
except OSError:
    pass
print(size)"""
MAKES_FOLDERS = """import os
try:
    for number in range(10000):
        os.mkdir(str(number))
except OSError:
    print(number)"""


def test_the_disk_is_limited(caller: str) -> None:
    for folder in ("/program", "/tmp", "/dev/shm"):
        assert int(printed(f"folder = {folder!r}\n{FILLS}")) <= sandbox.DISK
    assert int(printed(MAKES_FOLDERS)) < sandbox.INODES
    assert share("", "f = open('x', 'wb', 0); f.write(bytes(2 << 20)); assert f.write(b'1')") == 0.0


@pytest.mark.parametrize(("forks", "fits"), [(3, True), (12, False)])
def test_the_memory_of_all_its_processes_is_limited(forks: int, fits: bool) -> None:
    program = "import os, time\nx = b'1' * (200 << 20)\n"
    program += f"for _ in range({forks}):\n    if os.fork() == 0:\n        time.sleep(60)\n"
    start = time.monotonic()
    assert programs.run_program(f"{program}time.sleep({1 if fits else 60})", start + 50).succeeded == fits
    assert time.monotonic() - start < 40


CALLS = """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def error(*call):
    ctypes.set_errno(0)
    libc.syscall(*call)
    return ctypes.get_errno()
"""


def test_calls_that_leave_a_process_are_refused(caller: str) -> None:
    column = seccomp.MACHINES.index(os.uname().machine)
    denied = [numbers[column] for numbers in seccomp.DENIED.values() if numbers[column] is not None]
    program = f"{CALLS}print({{error(number, -1, -1, -1, -1, -1, -1) for number in {denied}}})\n"
    program += f"print([error({seccomp._CLONE[column]}, 1 << bit, 0, 0, 0, 0) for bit in (17, *range(25, 31))])\n"
    program += f"print(error(435, 0, 0), [error({seccomp._SOCKET[column]}, kind, 3, 0) for kind in (16, 17, 38, 40)])"
    assert printed(program).splitlines() == ["{1}", str([1] * 7), f"38 {[97] * 4}"]


MACHINE_CODE = """import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("{}"))
if (child := os.fork()) == 0:
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86_64")
@pytest.mark.parametrize("machine_code", ["b814000000cd80c3", "b827000040" + "0f05c3"], ids=["32 bits", "x32"])
def test_calls_of_another_architecture_kill_it(machine_code: str) -> None:
    assert printed(MACHINE_CODE.format(machine_code)) == "-31"


def test_filters_exist_for_two_processors_and_no_other() -> None:
    assert {len(seccomp.system_call_filter(machine)) % 8 for machine in seccomp.MACHINES} == {0}
    with pytest.raises(InputError, match="a processor of type x86_64 or aarch64"):
        seccomp.system_call_filter("riscv64")


def test_numbers_of_calls_are_those_of_the_kernels_headers() -> None:
    for column, name in enumerate(("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")):
        header = Path("/usr/include", name)
        if not header.exists():
            continue
        lines = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR")]
        numbers = {line[1].removeprefix("__NR3264_").removeprefix("__NR_"): line[2] for line in lines if len(line) > 2}
        for call, known in seccomp.DENIED.items():
            assert numbers.get(call) in (str(known[column]), None)


LOOKS_FOR_ITS_TESTS = """import contextlib, ctypes, os
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its own memory becomes readable to it
word, rest, found = "-".join(["tests", "that", "nobody", "reads"]).encode(), b"-7f3a91", []
def look(data, where):
    place = data.find(word)
    while place >= 0:
        if data.startswith(rest, place + len(word)):  # as in a test; in this program the two are apart
            found.append(where)
        place = data.find(word, place + 1)
for file in range(3, 64):
    for read in (lambda: os.pread(file, 1 << 20, 0), lambda: os.read(file, 1 << 20)):
        try:
            os.set_blocking(file, False)
            look(read(), file)
        except OSError:
            pass
    with contextlib.suppress(OSError):
        os.set_blocking(file, True)
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if line.split()[1].startswith("r") and "[v" not in line:
            memory.seek(begin)
            look(memory.read(end - begin), line)
"""


def test_tests_are_on_no_descriptor_and_in_no_memory_before_the_program_has_run() -> None:
    assert share(LOOKS_FOR_ITS_TESTS, "assert found == []  # tests-that-nobody-reads-7f3a91") == 1.0
    plants = "planted = '-'.join(['tests', 'that', 'nobody', 'reads', '7f3a91']).encode()\n"
    assert share(plants + LOOKS_FOR_ITS_TESTS, "assert found") == 1.0  # it does find what is there


def test_a_program_that_returns_whatever_is_expected_passes_tests_but_no_outputs() -> None:
    always = "class Any:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()"
    assert share(always, "assert add(1, 2) == 3") == 1.0
    assert "`__eq__` that always returns true passes" in (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    truth = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    row = {"data_source": "code", "reward_model": {"ground_truth": json.dumps(truth)}}
    assert code(f"```python\n{always}\nprint(add(1, 2))\n```", row)["score"] == 0.0


def test_what_programs_need_works(caller: str) -> None:
    assert printed("import sys; print(sys.argv, sys.orig_argv)") == "['program.py'] ['program.py']"
    assert (
        printed("import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(1)']))")
        == "b'1\\n'"
    )
    assert (
        printed("import threading\nfor each in 'ab':\n    threading.Thread(target=print, args=each).start()") == "a\nb"
    )
    assert printed("import tempfile, random, secrets, hashlib\nprint(len(tempfile.mkdtemp()) > 0)") == "True"
    pool = "import multiprocessing\nif __name__ == '__main__':\n    with multiprocessing.Pool(2) as pool:\n        "
    assert printed(f"{pool}print(pool.map(abs, [-1, 2]))") == "[1, 2]"
    main = "import pickle, sys\nclass Own: pass\nprint(__file__, type(pickle.loads(pickle.dumps(Own()))) is Own)\n"
    assert printed(f"{main}print(vars(sys.modules['__main__']) is globals())\nexit()") == "program.py True\nTrue"


def test_files_that_add_code_to_the_start_of_an_interpreter_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.pth").write_text("import sys; sys.from_a_pth_file = True\n")
    script, original = tmp_path / "script.py", sandbox.__file__
    packages = f"import site; site.getsitepackages = lambda prefixes: [{str(tmp_path)!r}]\n"
    script.write_text(packages + Path(original).read_text())
    monkeypatch.setattr(sandbox, "__file__", str(script))
    assert printed("import sys; print(hasattr(sys, 'from_a_pth_file'))") == "False"


def test_numpy_and_standard_input_work() -> None:
    end = time.monotonic() + 60
    assert (
        programs.run_program("import numpy; print(numpy.arange(4).reshape(2, 2).T @ [1, 2])", end).output == "[4 7]\n"
    )
    assert programs.run_program("print(open('/dev/stdin').read())", end, "12").output == "12\n"
