"""Locks that keep two commands from writing to one place."""

import errno
import fcntl
from typing import Final, TextIO

WITHOUT_LOCKS: Final = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP)
"""Of network file systems that lock nothing: commands are as safe there as their users are careful."""


def try_lock(held: int | TextIO) -> bool:
    """Whether no other command holds this open file or directory; it is this one's until it is closed.

    The end of the process closes it too. True as well where the file system locks nothing.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True
