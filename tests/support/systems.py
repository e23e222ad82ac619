"""Another operating system, as far as its Python lacks names that Linux has.

    from tests.support import systems
    systems.become("macos")      # before the first import of torchrelay, in a process of its own

Names go from `os`, `fcntl`, `mmap`, `socket`, `signal`, `resource`, `select` and the C library, and
`/proc` is not there. torch and the standard library are imported before: they are Linux's. What
such a system does differently under the same name (paths with a drive, files that cannot be removed
while they are open) is not imitated, with two exceptions: "windows" opens no directory and takes
no `dir_fd`.
"""

from __future__ import annotations

import ctypes
import fnmatch
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

MACOS = {
    "os": """O_DIRECT O_PATH O_TMPFILE O_NOATIME O_LARGEFILE RWF_* POSIX_FADV_* posix_fadvise
        posix_fallocate memfd_create MFD_* eventfd* EFD_* timerfd* TFD_* pidfd_open PIDFD_*
        sched_get* sched_set* sched_rr* splice SPLICE_* copy_file_range getrandom GRND_*
        fdatasync getres* setres* setns unshare CLONE_* *xattr XATTR_* SCHED_BATCH SCHED_IDLE
        pipe2 sendfile""",
    "fcntl": "F_*SEAL* F_SETPIPE_SZ F_GETPIPE_SZ F_NOTIFY DN_* F_*LEASE F_*SIG F_*EXCLUSIVE*",
    "mmap": "MAP_POPULATE MAP_STACK MAP_DENYWRITE MAP_EXECUTABLE MAP_NORESERVE MAP_HUGETLB "
    "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DO* MADV_DONTFORK MADV_DONTDUMP MADV_HWPOISON "
    "MADV_*MERGEABLE "
    "MADV_SOFT_OFFLINE MADV_REMOVE MADV_POPULATE*",
    "socket": "SO_PEERCRED SO_BINDTODEVICE SO_MARK SO_PRIORITY SO_DOMAIN SO_PROTOCOL SO_PASSCRED "
    "SCM_CREDENTIALS TCP_USER_TIMEOUT TCP_QUICKACK TCP_KEEPIDLE TCP_LINGER2 TCP_INFO MSG_NOSIGNAL "
    "MSG_MORE MSG_ERRQUEUE MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_PACKET AF_ALG "
    "AF_VSOCK NETLINK_* PACKET_* ALG_* VM* CAN_* AF_CAN",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTM* SIGPOLL SIGPWR SIGSTKFLT SIGCLD",
    "resource": "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING "
    "RUSAGE_THREAD",
    "select": "epoll EPOLL*",
}
SYMBOLS = {
    "process_vm_readv",
    "process_vm_writev",
    "renameat2",
    "mallopt",
    "malloc_trim",
    "sync_file_range",
    "syncfs",
    "memfd_create",
    "fstatfs",  # it is there, with a larger record: whoever asks for Linux's gets a torn stack
    "prctl",
    "gettid",
}
WINDOWS = {
    "os": """fork* register_at_fork get*uid get*gid getgroups setuid setgid setsid getsid *pgid
        *pgrp killpg uname *statvfs pread* pwrite* readv writev O_CLOEXEC O_DIRECTORY O_NOFOLLOW
        O_NONBLOCK O_NOCTTY O_SYNC O_DSYNC O_RSYNC O_ASYNC O_NDELAY fchmod *chown mkfifo mknod sync
        nice wait wait3 wait4 waitid WNOHANG WIF* WEXIT* WTERM* WSTOP* WCORE* getloadavg
        posix_spawn*
        ctermid *openpty fchdir chroot lockf F_* P_PID* P_ALL RTLD_* sysconf* confstr* fpathconf
        pathconf ttyname sched_yield""",
    "mmap": "PROT_* MAP_* MADV_*",
    "socket": "AF_UNIX send_fds recv_fds CMSG_* SCM_* SO_REUSEPORT socketpair",
    "signal": "SIGKILL SIGUSR* SIGHUP SIGCHLD SIGALRM SIGSTOP SIGCONT SIGPIPE SIGQUIT SIGTSTP "
    "SIGTT* "
    "SIGBUS SIGIO SIGPROF SIGSYS SIGTRAP SIGURG SIGVTALRM SIGWINCH SIGX* pthread_* sig*wait* "
    "setitimer getitimer ITIMER_* alarm pause siginterrupt",
    "select": "poll POLL*",
}
MISSING = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")  # modules of Windows


def become(system: str) -> None:
    """Be "macos" or "windows" from now on. There is no way back."""
    _imported_before()
    for module, names in MACOS.items():
        _remove(module, names)
    ctypes.CDLL.__getattr__ = _without(ctypes.CDLL.__getattr__)  # type: ignore[method-assign]
    sys.addaudithook(_no_proc)
    for name in ("stat", "lstat", "access", "readlink"):
        setattr(os, name, _hides_proc(getattr(os, name)))
    sys.platform = "darwin"
    if system == "windows":
        _become_windows()


def _imported_before() -> None:
    for name in (
        *("numpy", "torch", "torch.distributed", "torch.distributed.checkpoint"),
        *("torch.distributed.tensor", "torch.distributed.fsdp", "safetensors", "msgspec", "xxhash"),
        *("torch.distributed.checkpoint.state_dict", "rich.console", "rich.table", "rich.tree"),
        *("typer", "typer.testing", "subprocess", "selectors", "asyncio", "ssl", "tempfile"),
        *("multiprocessing.util", "multiprocessing.connection", "multiprocessing.shared_memory"),
        *("http.client", "http.server", "shutil", "uuid", "socketserver", "logging.handlers"),
    ):
        importlib.import_module(name)
    sysconfig.get_config_vars()  # of a file that is named by the system
    shutil: Any = sys.modules["shutil"]
    shutil._USE_CP_SENDFILE = shutil._use_fd_functions = False
    selectors: Any = sys.modules["selectors"]
    selectors.DefaultSelector = selectors.SelectSelector


def _remove(module: str, patterns: str) -> None:
    home = importlib.import_module(module)
    for pattern in patterns.split():
        for name in fnmatch.filter(list(vars(home)), pattern):
            delattr(home, name)


def _without(found: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def get(library: ctypes.CDLL, name: str) -> Any:
        if name in SYMBOLS:
            raise AttributeError(f"symbol not found: {name}")
        return found(library, name)

    return get


def _is_proc(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    return os.fsdecode(path).startswith(("/proc", "/sys/", "/dev/shm"))


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _is_proc(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _hides_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def hides(path: Any, *others: Any, **named: Any) -> Any:
        if _is_proc(path):
            if call.__name__ == "access":
                return False
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *others, **named)

    return hides


def _become_windows() -> None:
    for name in MISSING:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in WINDOWS.items():
        _remove(module, names)
    opened, load = os.open, ctypes.CDLL.__init__

    def no_directories(
        path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        _no_dir_fd(dir_fd)
        fd = opened(path, flags, mode)
        if Path(os.fsdecode(path)).is_dir():
            os.close(fd)
            raise PermissionError(13, "Permission denied", path)
        return fd

    def no_program_itself(
        library: ctypes.CDLL, name: str | None, *others: Any, **named: Any
    ) -> None:
        if name is None:
            raise TypeError("argument 1 must be str, not None")
        load(library, name, *others, **named)

    os.open = no_directories
    ctypes.CDLL.__init__ = no_program_itself  # type: ignore[assignment]
    for name in (
        "stat",
        "lstat",
        "unlink",
        "rename",
        "replace",
        "mkdir",
        "rmdir",
        "link",
        "access",
    ):
        setattr(os, name, _by_path_alone(getattr(os, name)))
    scanned = os.scandir

    def scan(path: Any = ".") -> Any:
        if isinstance(path, int):
            raise TypeError("scandir: path should be string, bytes or os.PathLike, not int")
        return scanned(path)

    os.scandir = scan  # type: ignore[assignment]
    os.supports_dir_fd = os.supports_fd = set()
    sys.platform = "win32"


def _no_dir_fd(value: object) -> None:
    if value is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")


def _by_path_alone(call: Callable[..., Any]) -> Callable[..., Any]:
    def by_path(*arguments: Any, **named: Any) -> Any:
        for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            _no_dir_fd(named.pop(name, None))
        if call.__name__ == "stat" and isinstance(arguments[0], int):
            return os.fstat(arguments[0])
        return call(*arguments, **named)

    return by_path
