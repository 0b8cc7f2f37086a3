"""What `/admin` reads and writes, and how its bodies are described."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIType
from msgspec import UNSET, Meta, Struct, UnsetType, field

from gateway.config import Name, TenantSettings, Weight, located
from gateway.ring import Denied
from policies.quota import Limit
from policies.reasons import Reason

Label = Annotated[str, Meta(max_length=200)]
Lifetime = Annotated[int, Meta(ge=0, le=100 * 365 * 86_400)]
"""In seconds."""

T = TypeVar("T")


class NewTenant(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant to be made; what is left out has the defaults of `[[tenant]]`."""

    name: Name


class TenantChanges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """New settings; what is left out stays."""

    weight: Weight | UnsetType = UNSET
    top_class: str | UnsetType = field(name="class", default=UNSET)
    models: tuple[str, ...] | UnsetType = UNSET
    requests_per_min: Limit | UnsetType = UNSET
    tokens_per_min: Limit | UnsetType = UNSET
    tokens_in_flight: Limit | UnsetType = UNSET
    max_queued: Limit | UnsetType = UNSET


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to be made. It expires after so many seconds; 0 is never."""

    label: Label = ""
    expires_in_s: Lifetime = 0


class Rotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The old key goes on for `grace_s` seconds; the new one has its label and its end unless another is given."""

    grace_s: Lifetime = 0
    expires_in_s: Lifetime | UnsetType = UNSET


Source = Literal["config", "store"]


class TenantView(Struct, kw_only=True):
    """A tenant, its settings, and how many keys of it are good now. `created` is Unix time, null if configured."""

    name: str
    source: Source
    created: int | None
    keys: int
    weight: float
    top_class: str = field(name="class")
    models: list[str]
    requests_per_min: int
    tokens_per_min: int
    tokens_in_flight: int
    max_queued: int


class TenantList(Struct):
    data: list[TenantView]
    object: str = "list"


class KeyView(Struct, kw_only=True):
    """A key, without its secret. Times are Unix seconds, null where there is none."""

    id: str
    tenant: str
    source: Source
    state: Literal["good", "expired", "revoked"]
    label: str
    created: int | None
    expires: int | None
    revoked: int | None


class NewKeyView(KeyView, kw_only=True):
    """A key with its secret: `key` is shown here and never again."""

    key: str


class KeyList(Struct):
    data: list[KeyView]
    object: str = "list"


def read(body: bytes, form: type[T]) -> T:
    """A body as its form; an empty one has the defaults. Raises Denied, which names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=form)
    except msgspec.ValidationError as error:
        fault = located(str(error))
        where = fault.path.removeprefix("$").removeprefix(".") or None
        message = f"{where}: {fault.message}" if where else fault.message
        raise Denied(Reason.INVALID_REQUEST, message, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Denied(Reason.INVALID_REQUEST, f"the body is not valid JSON: {error}") from None


def asks(form: type[Struct]) -> type[Operation]:
    """For OpenAPI: the operation whose body is this form."""
    (whole,), components = msgspec.json.schema_components([form], ref_template="{name}")
    described = components[whole["$ref"]]
    body = RequestBody(
        content={"application/json": OpenAPIMediaType(schema=_schema(described))},
        required=bool(described.get("required")),
    )

    @dataclass
    class FormOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = body

    return FormOperation


_SAME = ("minimum", "maximum", "pattern", "default", "description")


def _schema(found: dict[str, Any]) -> Schema:
    """JSON Schema as Litestar's own. Its patterns are JavaScript's, where `$` is the very end."""
    out = Schema(type=OpenAPIType(found["type"]), **{name: found[name] for name in _SAME if name in found})
    out.max_length = found.get("maxLength")
    if out.pattern is not None:
        out.pattern = out.pattern.replace(r"\Z", "$")
    if "properties" in found:
        out.properties = {name: _schema(each) for name, each in found["properties"].items()}
        out.required = found.get("required") or None
        out.additional_properties = found.get("additionalProperties")
    if "items" in found:
        out.items = _schema(found["items"])
    return out
