"""Keeps what Transformers finds out about installed files at each import, for the next import.

Importing it reads 2,400 model files for what they export, and the list of files of every installed
distribution: a quarter of what an import of this library costs, in each process that a test starts.
What was found is kept under ``.pytest_cache``, by the folders that were read and when they changed.
"""

import hashlib
import marshal
import os
import sys

KEPT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    ".pytest_cache/known_scans",
)


def _found(key, scan):
    """What a scan finds, which is asked once for a key."""
    name = hashlib.sha256(repr((sys.version, key)).encode()).hexdigest()
    path = os.path.join(KEPT, name)
    try:
        with open(path, "rb") as file:
            return marshal.load(file)
    except (OSError, EOFError, ValueError, TypeError):  # it was not asked, or is half a file
        found = scan()
    try:
        os.makedirs(KEPT, exist_ok=True)
        with open(f"{path}.{os.getpid()}", "wb") as file:
            marshal.dump(found, file)
        os.replace(f"{path}.{os.getpid()}", path)
    except OSError:  # a sandbox, or a full disk of a test: the next one scans again
        pass
    return found


def _changed(path):
    return path, os.stat(path).st_mtime_ns


def _has_distributions(path):
    try:
        return any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(path))
    except OSError:
        return False


def _keep_distributions():
    """Keep which distributions have which packages, for folders that have distributions."""
    from importlib import metadata

    scan = metadata.packages_distributions

    def packages_distributions():
        folders = [path or "." for path in sys.path]
        return _found(
            [_changed(os.path.abspath(path)) for path in folders if _has_distributions(path)], scan
        )

    metadata.packages_distributions = packages_distributions


def _keep_exports(module):
    """Keep what the model files of a Transformers export, for ``module``, which reads them."""
    scan = module.create_import_structure_from_path
    models = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")

    def scan_all():
        module.create_import_structure_from_path = scan  # which calls itself by this name
        return scan(models)

    kept = _found([_changed(models), _changed(module.__file__)], scan_all)

    def create_import_structure_from_path(path):
        path = os.fspath(path)
        folder = os.path.dirname(path) if path.endswith(".py") else path
        if folder == models:
            return kept
        return kept[os.path.basename(folder)] if os.path.dirname(folder) == models else scan(path)

    module.create_import_structure_from_path = create_import_structure_from_path


class _Finder:
    """Sees Transformers being imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Find no module but the one whose function is replaced once it has run."""
        if name == "transformers":
            _keep_distributions()
        if name != "transformers.utils.import_utils":
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(_Finder)
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if hasattr(module, "create_import_structure_from_path"):  # from 4.45 on
                _keep_exports(module)

        spec.loader.exec_module = exec_module
        return spec


def keep():
    """Let Transformers find what an earlier import found."""
    if "transformers" not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
