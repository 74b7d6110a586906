"""From the interpreter that was started to one that holds no rights that code could use."""

import os

from . import kernel

_PRIVATE = ("/home", "/root", "/run", "/var", "/srv", "/mnt", "/media")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/dev", "/tmp")


def become_first_process(config):
    """Where no bubblewrap did it: namespaces of our own, and everything read-only.

    The caller goes on as the first process of a process namespace; what called it waits for that
    and exits as it did.
    """
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWNS
    flags |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
    if config["change_user_to"] is None:
        _unshare_with_one_user(flags)
    else:
        kernel.unshare(flags)
    child = os.fork()
    if child:
        os.closerange(0, 3)
        os.close(config["status_fd"])
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    kernel.die_with_parent()
    kernel.make_mounts_private()
    _hide_all_but(config["readable"])
    kernel.make_mounts_read_only()
    kernel.mount_proc()


def _hide_all_but(readable):
    """Empty directories over those that hold what is private; what is needed shows through.

    The rest of the file system stays visible by name; Landlock keeps it from being read.
    """
    needed = [path for path in readable if not os.path.islink(path) and os.path.isdir(path)]
    covered = [path for path in _PRIVATE if os.path.isdir(path) and not os.path.islink(path)]
    for path in needed:
        top = "/" + path.split("/")[1]
        if top not in covered and top not in _SYSTEM:
            covered.append(top)
    shown = {
        path: os.open(path, os.O_PATH)
        for path in needed
        if any(path.startswith(top + "/") for top in covered)
    }
    for top in covered:
        kernel.mount_small_disk(top, 1 << 16, 256, mode="755")
    for path, place in shown.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount_again(f"/proc/self/fd/{place}", path)
        os.close(place)


def make_private_disk(config):
    """A small ``/tmp``, which is also ``/dev/shm``."""
    kernel.mount_small_disk("/tmp", config["disk_bytes"], config["num_files"])
    if not os.path.islink("/dev/shm"):
        kernel.mount_again("/tmp", "/dev/shm")
    os.chdir("/tmp")


def give_up_rights(config):
    """Another user where this one is root, a user namespace of its own, no capabilities.

    The kernel does not limit the processes of its own root user, so being root in a user namespace
    does not do.
    """
    user = config["change_user_to"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.set_dumpable(True)  # else /proc/self/uid_map belongs to root
        _unshare_with_one_user(0)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.set_dumpable(False)


def _unshare_with_one_user(more_flags):
    """A user namespace in which this user alone exists: processes are counted in it."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | more_flags)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
