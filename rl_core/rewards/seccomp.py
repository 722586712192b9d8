"""The filter of system calls for programs written by a model: a BPF program as the kernel expects it.

Everything is allowed but calls that inspect other processes, change the system or its mounts, make namespaces, load
code into the kernel, or reserve memory that no limit counts. Numbers are those of the kernel's unistd_64.h and
asm-generic/unistd.h.
"""

import errno
import platform
import socket
import struct

from rl_core.errors import InputError

DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # keys
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # files by handle, past the root folder
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # large parts of the kernel that programs do not need
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "lookup_dcookie": (212, 18), "uselib": (134, None),
    "vmsplice": (278, 75), "modify_ldt": (154, None), "remap_file_pages": (216, 234), "nfsservctl": (180, 42),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443), "iopl": (172, None),
    "ioperm": (173, None), "vhangup": (153, 58), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "personality": (135, 92), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # memory that outlives its mapping, so that limits of processes miss it
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190),
}  # fmt: skip
"""Calls that fail with EPERM: their numbers on x86_64 and on aarch64, None if they do not exist there."""
MACHINES = ("x86_64", "aarch64")
_ARCHITECTURE = (0xC000003E, 0xC00000B7)
_CLONE, _CLONE3, _SOCKET = (56, 220), 435, (41, 198)
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
"""Flags of `clone` that make namespaces: mounts, cgroup, UTS, IPC, user, PID, network."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Socket families that are allowed; some others, such as vsock, are not bound to a network namespace."""

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
"""Offsets in the kernel's seccomp_data; the argument is the lower half of the first one."""


def system_call_filter(machine: str | None = None) -> bytes:
    """The filter for a machine (default: this one) as an array of the kernel's sock_filter.

    A call of another architecture kills the process. Raises InputError for a machine whose numbers are unknown.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        fix = "run on a machine with one of these processors"
        raise InputError(f"a processor of type {' or '.join(MACHINES)}", machine, "the sandbox of programs", fix)
    column = MACHINES.index(machine)
    rules = [(_LOAD, 0, 0, _MACHINE), (_EQUALS, 1, 0, _ARCHITECTURE[column]), _returns(_KILL)]
    rules.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":  # the x32 calls have the same architecture and other numbers
        rules += [(_AT_LEAST, 0, 1, _X32), _returns(_KILL)]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            rules += [(_EQUALS, 0, 1, number), _returns(_FAIL | errno.EPERM)]
    # The flags of clone3 are in memory, which a filter cannot read; libraries use clone if it does not exist.
    rules += [(_EQUALS, 0, 1, _CLONE3), _returns(_FAIL | errno.ENOSYS)]
    flags = [(_LOAD, 0, 0, _ARGUMENT), (_HAS_BITS, 0, 1, _NEW_NAMESPACES), _returns(_FAIL | errno.EPERM)]
    rules += [(_EQUALS, 0, len(flags) + 1, _CLONE[column]), *flags, _returns(_ALLOW)]
    families = [(_EQUALS, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    checked = [(_LOAD, 0, 0, _ARGUMENT), *families, _returns(_FAIL | errno.EAFNOSUPPORT)]
    rules += [(_EQUALS, 0, len(checked), _SOCKET[column]), *checked, _returns(_ALLOW)]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)


def _returns(action: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, action)
