"""Device names of a run: which of them exist, and which may stand together."""

import torch

from blockdraft.config import ConfigError


def check_replicas(names: tuple[str, ...]) -> list[list[torch.device]]:
    """The devices of each target replica; a plus sign joins those of one.

    Raises:
        ConfigError: an unknown device, or devices that cannot share one target.
    """
    if not names:
        check_devices((), "targets")
    replicas = [check_devices(tuple(name.split("+")), "targets") for name in names]
    for name, devices in zip(names, replicas, strict=True):
        if len({device.type for device in devices}) > 1:
            raise ConfigError(
                f"runtime.targets: {name} joins a CPU and a GPU; a replica's devices must be of one kind, since its "
                "layers run one after the other and the slowest part would set the pace"
            )
        if devices[0].type == "cuda" and len(set(devices)) < len(devices):
            raise ConfigError(f"runtime.targets: {name} names a GPU twice; each holds one part of the layers")
    return replicas


def check_devices(names: tuple[str, ...], what: str) -> list[torch.device]:
    """Parses device names and refuses those that are not there.

    Raises:
        ConfigError: an unknown device.
    """
    devices = []
    for name in names:
        if what != "targets" and "+" in name:
            raise ConfigError(f"runtime.{what}: {name} joins devices; a drafter lies on one, only a target is divided")
        devices.append(find_device(name, f"runtime.{what}"))
    if not devices:
        raise ConfigError(f"runtime.{what} is empty; name at least one device, such as cpu or cuda:0")
    return devices


def find_device(name: str, option: str) -> torch.device:
    """The device of that name, which `option` was given.

    Raises:
        ConfigError: no name of a device, or one that is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{option}: expected cpu or cuda:N, got {name!r}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    count = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index >= count):
        raise ConfigError(
            f"{option}: {name} is not here; this machine has {count} CUDA devices (and cpu); name one that is there, "
            f"such as --{option.removeprefix('--')} cpu"
        )
    return device
