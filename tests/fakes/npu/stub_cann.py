"""Stubs of the CANN libraries, so that the real torch_npu can be imported on a machine without CANN.

Every undefined function that torch_npu's binaries link or look up at run time becomes a stub that returns 0; only the
names are taken, from torch_npu itself. Under FakeTensorMode its schemas, shapes and autograd formulas work; real
tensors, streams and memory do not. Needs gcc and binutils.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# The few answers that decide whether torch_npu sees a device, and that autograd may ask it for its stream.
ANSWERS = """
int aclrtGetDeviceCount(unsigned *count) { *count = 8; return 0; }
int aclrtGetDevice(int *device) { *device = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
int aclrtCreateStreamWithConfig(void **out, unsigned priority, unsigned flag) { *out = (void *)64; return 0; }
int aclrtGetCurrentContext(void **out) { *out = (void *)64; return 0; }
"""
# Beside a CUDA build of torch 2.14, torch_npu 2.14 registers a key of the allocator's settings that CUDA has too,
# and aborts; here each caller gets an empty std::unordered_set of keys of its own.
KEYS_OF_THE_ALLOCATOR = """
#include <stdlib.h>
struct set { void **buckets; size_t bucket_count; void *first; size_t count; float load; size_t resize; void *one; };
void *keys(void) __asm__("_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev");
void *keys(void) {
    struct set *made = calloc(1, sizeof *made);
    made->buckets = &made->one, made->bucket_count = 1, made->load = 1;
    return made;
}
"""
SYSTEM_LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
)


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is not installed: make test-ascend builds .venv-npu"
    return Path(spec.origin).parent


def dynamic_symbols(library: Path, which: str) -> set[str]:
    """Names that a library defines ("--defined-only"), or wants without a way to live without ("--undefined-only")."""
    lines = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {field[-1].split("@")[0] for field in fields if len(field) >= 2 and field[-2] not in "wv"}


def system_libraries() -> Iterable[Path]:
    for name in SYSTEM_LIBRARIES:
        path = subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if path != name:  # gcc repeats what it does not find
            yield Path(path)


def needed_libraries(library: Path) -> set[str]:
    """The file names of the libraries that a library is linked against."""
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))


def build(folder: Path) -> list[Path]:
    """One library with every missing function, and an empty one for each other that torch_npu is linked against."""
    npu, torch_lib = package_folder("torch_npu"), package_folder("torch") / "lib"
    ours = [*npu.glob("lib/*.so"), *npu.glob("_C*.so")]
    providers = [*ours, *torch_lib.glob("*.so*"), *system_libraries()]
    defined = set().union(*(dynamic_symbols(library, "--defined-only") for library in providers))
    linked = set().union(*(dynamic_symbols(library, "--undefined-only") for library in ours))
    # What it looks up by name at run time stands in its binaries as a string.
    by_name = {name.decode() for so in ours for name in re.findall(rb"\0((?:acl|Hccl)\w{3,60})(?=\0)", so.read_bytes())}
    answered = set(re.findall(r"(\w+)\((?=[^)]*\) \{)", ANSWERS))
    missing = sorted(name for name in (linked | by_name) - defined - answered if not re.match(r"_?Py", name))
    folder.mkdir(parents=True, exist_ok=True)
    with_cuda = (torch_lib / "libc10_cuda.so").exists()
    (folder / "answers.c").write_text(ANSWERS + (KEYS_OF_THE_ALLOCATOR if with_cuda else ""))
    (folder / "missing.s").write_text("".join(map(assembly, missing)) + '.section .note.GNU-stack,"",@progbits\n')
    (folder / "nothing.c").write_text("")
    there = {path.name for path in providers}
    names = {n for so in ours for n in needed_libraries(so) - there if not n.startswith(("ld-", *SYSTEM_LIBRARIES))}
    first = "libascendcl.so"
    link(folder / first, folder / "missing.s", folder / "answers.c")
    for name in sorted(names - {first}):
        link(folder / name, folder / "nothing.c")
    return [folder / first, *(folder / name for name in sorted(names - {first}))]


def assembly(symbol: str) -> str:
    """A function that returns 0; for the names of C++ type information, 512 zero bytes."""
    if re.match(r"_ZT[ISV]", symbol):
        head = f'.data\n.globl "{symbol}"\n.type "{symbol}",%object\n.size "{symbol}",512\n.align 16\n'
        return f'{head}"{symbol}": .zero 512\n'
    returns_0 = "xor %eax,%eax" if Path("/lib64/ld-linux-x86-64.so.2").exists() else "mov x0, #0"
    return f'.text\n.globl "{symbol}"\n.type "{symbol}",%function\n"{symbol}": {returns_0}\nret\n'


def link(library: Path, *sources: Path) -> None:
    command = [
        "gcc",
        "-shared",
        "-nostdlib",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        "-o",
        str(library),
        *map(str, sources),
    ]
    subprocess.run(command, check=True)


def load(libraries: Iterable[Path]) -> None:
    """Load them for everyone: the loader then takes them for the libraries of the same names."""
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
