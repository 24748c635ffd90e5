"""Asks the Kubernetes API server who a caller is and what it may do: TokenReview and SubjectAccessReview.

Edge: the only place that knows the Kubernetes client, which blocks: it runs in threads, each call with a deadline.
Imported only where callers are checked, since the client takes 20 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from kubernetes import client, config
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from .access import API_GROUP, RESOURCE, Caller, Right
from .gate import NoApiServer, ReviewsUnavailable
from .settings import AccessSettings

T = TypeVar("T")

FORBIDDEN = (
    ": bind this scheduler's ServiceAccount to a ClusterRole that may create tokenreviews and "
    "subjectaccessreviews"
)


class KubernetesReviews:
    """Reviews by the API server of the pod that this runs in, or else of the kubeconfig. Raises NoApiServer."""

    def __init__(self, settings: AccessSettings) -> None:
        self._settings = settings
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                raise NoApiServer(
                    "--auth kubernetes needs the API server: run in a pod with a ServiceAccount, "
                    f"or set KUBECONFIG ({error})"
                ) from error
        # Once more where a kept connection turns out to be closed. The client's own default would outlast the deadline.
        configuration.retries = Retry(1, connect=0, status=0, redirect=0, allowed_methods=None)
        configuration.connection_pool_maxsize = settings.review_threads
        self._api = client.ApiClient(configuration)
        self._tokens = client.AuthenticationV1Api(self._api)
        self._rights = client.AuthorizationV1Api(self._api)
        self._threads = ThreadPoolExecutor(settings.review_threads, "reviews")

    async def caller(self, token: str, audience: str) -> Caller | None:
        """Whose token this is, made for that audience; None: nobody's. Raises ReviewsUnavailable."""
        asked = client.V1TokenReview(
            spec=client.V1TokenReviewSpec(token=token, audiences=[audience])
        )
        answer = await self._in_thread(
            lambda: self._tokens.create_token_review(
                asked, _request_timeout=self._settings.review_s
            )
        )
        status = answer.status
        # An API server that does not know of audiences names none: its word is not about this one.
        if status is None or not status.authenticated or audience not in (status.audiences or ()):
            return None
        user = status.user
        if user is None or not user.username:
            return None
        return Caller(
            user.username,
            user.uid or "",
            tuple(user.groups or ()),
            {key: tuple(values) for key, values in (user.extra or {}).items()},
        )

    async def allowed(self, caller: Caller, right: Right) -> Literal[True] | None:
        """Whether the caller has this right on the fleet; None: no. Raises ReviewsUnavailable."""
        asked = client.V1SubjectAccessReview(
            spec=client.V1SubjectAccessReviewSpec(
                user=caller.username,
                uid=caller.uid or None,
                groups=list(caller.groups),
                extra={key: list(values) for key, values in (caller.extra or {}).items()},
                resource_attributes=client.V1ResourceAttributes(
                    group=API_GROUP,
                    resource=RESOURCE,
                    subresource=right.subresource,
                    name=self._settings.fleet,
                    namespace=self._settings.namespace,
                    verb=right.verb,
                ),
            )
        )
        answer = await self._in_thread(
            lambda: self._rights.create_subject_access_review(
                asked, _request_timeout=self._settings.review_s
            )
        )
        return True if answer.status is not None and answer.status.allowed else None

    async def close(self) -> None:
        """Lets go of the connections; calls under way end by their own deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._api.close()  # type: ignore[no-untyped-call]

    async def _in_thread(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            # Waiting for a thread counts too.
            async with asyncio.timeout(2 * self._settings.review_s):
                return await loop.run_in_executor(self._threads, call)
        except TimeoutError:
            raise ReviewsUnavailable("no answer in time") from None
        except client.ApiException as error:
            # Without its body, which may repeat what was asked.
            hint = FORBIDDEN if error.status == 403 else ""
            raise ReviewsUnavailable(f"status {error.status} {error.reason}{hint}") from None
        except (HTTPError, OSError) as error:
            raise ReviewsUnavailable(f"{type(error).__name__}: {error}") from None
