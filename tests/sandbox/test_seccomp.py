"""The verdicts of the seccomp filter, found by running its program, also for other machines than the tests' own."""

import errno
import struct

import pytest
from envserver.sandbox.seccomp import ABSENT, ARCHITECTURES, REFUSED, program

ALLOWED = "allowed"


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str:
    """Run the program for *machine* as the kernel would; return the name of the errno, or ``allowed``."""
    arch = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("IIQ6Q", number, arch, 0, *(*arguments, *[0] * (6 - len(arguments))))
    code = list(struct.iter_unpack("HBBI", program(machine)))
    held = at = 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x20:
            held = struct.unpack_from("I", data, k)[0]
        elif operation == 0x06:
            return ALLOWED if k == 0x7FFF0000 else errno.errorcode[k & 0xFFFF]
        else:
            holds = {0x15: held == k, 0x45: bool(held & k), 0x35: held >= k}[operation]
            at += if_true if holds else if_false


MACHINES = pytest.mark.parametrize("machine", list(ARCHITECTURES))


@MACHINES
def test_every_call_of_the_tables_has_its_errno_and_all_other_calls_pass(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    refused = {row[column] for row in REFUSED.values()} - {None}
    absent = {row[column] for row in ABSENT.values()} - {None}

    verdicts = {number: verdict(machine, number, 1) for number in range(460)}

    assert {number for number, word in verdicts.items() if word == "EPERM"} == refused
    assert {number for number, word in verdicts.items() if word == "ENOSYS"} == absent
    assert {word for number, word in verdicts.items() if number not in refused | absent} == {ALLOWED}


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        pytest.param("x86_64", 56, (0x01200011,), ALLOWED, id="a fork"),
        pytest.param("x86_64", 56, (0x003D0F00,), ALLOWED, id="a thread"),
        pytest.param("x86_64", 56, (0x10000011,), "EPERM", id="a clone with a user namespace"),
        pytest.param("aarch64", 220, (0x00020011,), "EPERM", id="a clone with a mount namespace"),
        pytest.param("x86_64", 56, (0x00008011,), "EPERM", id="a clone with the caller's parent"),
        pytest.param("x86_64", 41, (2,), ALLOWED, id="an IPv4 socket"),
        pytest.param("x86_64", 41, (40,), "EAFNOSUPPORT", id="a vsock socket"),
        pytest.param("aarch64", 198, (40,), "EAFNOSUPPORT", id="a vsock socket on aarch64"),
        pytest.param("aarch64", 199, (1,), ALLOWED, id="a pair of Unix sockets"),
        pytest.param("x86_64", 41, (16, 3, 0), ALLOWED, id="a netlink socket for routes"),
        pytest.param("x86_64", 41, (16, 3, 12), "EPROTONOSUPPORT", id="a netlink socket for netfilter"),
        pytest.param("aarch64", 198, (16, 3, 4), "EPROTONOSUPPORT", id="a netlink socket for diagnoses on aarch64"),
        pytest.param("x86_64", 9, (0, 4096, 3, 0x22), ALLOWED, id="a private anonymous mapping"),
        pytest.param("x86_64", 9, (0, 4096, 3, 0x01, 5), ALLOWED, id="a shared mapping of a file"),
        pytest.param("x86_64", 9, (0, 4096, 3, 0x21), "EPERM", id="a shared anonymous mapping"),
        pytest.param("x86_64", 9, (0, 4096, 3, 0x48021), "EPERM", id="a shared anonymous mapping with more flags"),
        pytest.param("aarch64", 222, (0, 4096, 3, 0x23), "EPERM", id="a validated shared anonymous mapping"),
        pytest.param("x86_64", 72, (5, 1), ALLOWED, id="a flag of a file"),
        pytest.param("x86_64", 72, (5, 1024, 1), "EINVAL", id="a lease on a file"),
        pytest.param("aarch64", 25, (5, 1024, 1), "EINVAL", id="a lease on a file on aarch64"),
        pytest.param("x86_64", 16, (0, 0x5412), "EPERM", id="text into a terminal"),
        pytest.param("x86_64", 16, (0, 0x5401), ALLOWED, id="a terminal's settings"),
        pytest.param("aarch64", 29, (0, 0x5412), "EPERM", id="text into a terminal on aarch64"),
        pytest.param("x86_64", 0x40000000, (), "ENOSYS", id="a call by its x32 number"),
    ],
)
def test_a_call_is_judged_by_its_arguments(
    machine: str, number: int, arguments: tuple[int, ...], expected: str
) -> None:
    assert verdict(machine, number, *arguments) == expected


@MACHINES
def test_calls_of_another_architecture_are_unknown(machine: str) -> None:
    assert verdict(machine, 1, architecture=0x40000003) == "ENOSYS"


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        program("riscv64")
