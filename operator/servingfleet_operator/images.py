"""Which images a fleet runs. Pure.

A fleet's author may not have the right to run anything: the relay would run with the account of other people's pods, the
scheduler with the right to ask the API server about tokens. So a fleet names only images that whoever installed the operator
has allowed.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from .errors import OperatorError
from .settings import OperatorSettings
from .spec import Fleet


class ImageNotAllowed(OperatorError):
    """The fleet's author must take the image out, or whoever installed the operator must allow it."""


def relay_image(fleet: Fleet, settings: OperatorSettings) -> str:
    """Raises ImageNotAllowed."""
    return _checked("relay", fleet.relay.image, settings) or settings.relay_image


def scheduler_image(fleet: Fleet, settings: OperatorSettings) -> str:
    """Raises ImageNotAllowed."""
    return _checked("scheduler", fleet.scheduler.image, settings) or settings.scheduler_image


def _checked(part: str, image: str, settings: OperatorSettings) -> str:
    own = (settings.relay_image, settings.scheduler_image)
    if (
        not image
        or image in own
        or any(fnmatchcase(image, each) for each in settings.allowed_images)
    ):
        return image
    allowed = ", ".join(settings.allowed_images) or "none"
    raise ImageNotAllowed(
        f"spec.{part}.image is {image}, and the operator allows {allowed}: take it out, or have the Helm "
        "value allowedImages extended"
    )
