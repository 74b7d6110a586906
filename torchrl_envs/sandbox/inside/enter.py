"""From the interpreter that was started to one that holds no rights that code could use."""

import os

from . import kernel


def make_private_disk(config):
    """A small ``/tmp``, which is also ``/dev/shm``; what is readable below it shows through."""
    below = [path for path in config["readable"] if path.startswith("/tmp/")]
    places = {path: os.open(path, os.O_PATH) for path in below}
    kernel.mount_small_disk("/tmp", config["disk_bytes"], config["num_files"])
    for path, place in places.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount_again(f"/proc/self/fd/{place}", path)
        os.close(place)
    os.chdir("/tmp")


def give_up_rights(config):
    """Another user where this one is root, a user namespace of its own, no capabilities."""
    # The kernel does not limit the processes of its own root user, so being root in a user
    # namespace does not do.
    user = config["change_user_to"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        kernel.set_dumpable(True)  # else /proc/self/uid_map belongs to root
        _unshare_with_one_user()
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.set_dumpable(False)


def _unshare_with_one_user():
    """A user namespace in which this user alone exists: processes are counted in it."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
