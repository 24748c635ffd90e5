"""What the API server can answer that the operator acts on, as one small tree.

    OperatorError
    └── ClusterError
        ├── Unreachable      no answer in time, or one that says "later": try again
        ├── NotFound         the object, or its kind, is not there
        ├── Refused          403: whoever installed the operator must give it the right
        ├── Terminating      the namespace is being deleted: nothing can be made in it
        ├── Conflict         409: somebody else changed the object, or owns a field
        └── Invalid          422 and the like: the object can't become what is wanted
    NotLeading               this replica must not write now
    ForeignObject            a name is taken by an object that the operator did not make

Every message says what was asked, what was answered and who should act.
"""

from __future__ import annotations


class OperatorError(Exception):
    """Root of what the operator expects to go wrong."""


class ClusterError(OperatorError):
    """The API server did not do what was asked."""

    def __init__(self, message: str, *, code: int = 0, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        """HTTP status; 0: no answer."""
        self.retry_s = retry_s
        """Seconds that the API server asked to wait. None: it did not say."""


class Unreachable(ClusterError):
    """No answer in time, or one that says "later"."""


class NotFound(ClusterError):
    """The object, or its kind, is not there."""


class Refused(ClusterError):
    """The operator's account has not the right."""


class Terminating(ClusterError):
    """The namespace is being deleted."""


class Conflict(ClusterError):
    """Somebody else changed the object in the meantime, or owns a field of it."""


class Invalid(ClusterError):
    """The object can't become what is wanted, as it is now."""


class NotLeading(OperatorError):
    """Another replica leads, or this one can't be sure that it still does."""


class ForeignObject(OperatorError):
    """A child's name is taken by an object that the operator did not make, and so leaves alone."""
