//! The failures that any route may answer with, described once and referred to by every operation.

use serde_json::{Value, json};
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{
    Content, ContentBuilder, ObjectBuilder, Ref, RefOr, Response, ResponseBuilder, Type,
};

/// A failure: its name in the document, its status, what it is, and an example of its code, message and hint.
type Failure = (&'static str, &'static str, &'static str, [&'static str; 3]);

const INVALID: Failure = (
    "Invalid",
    "400",
    "A value, a parameter, a field or the JSON itself is invalid, or what is asked for cannot be done as asked.",
    ["invalid", "unknown query parameter `nmae`", "see GET /v1/openapi.json"],
);
const UNAUTHORIZED: Failure = (
    "Unauthorized",
    "401",
    "There is no key, or it is unknown or has expired.",
    [
        "unauthorized",
        "the key is unknown or has expired",
        "send `Authorization: Bearer <key>`; the CLI reads SANDKEEP_KEY",
    ],
);
const FORBIDDEN: Failure = (
    "Forbidden",
    "403",
    "The key's scope does not reach so far, or the call was held and not approved.",
    [
        "forbidden",
        "this needs a key of scope `write`, and this one is `read`",
        "`keep key create LABEL --scope write` makes one",
    ],
);
const NOT_FOUND: Failure = (
    "NotFound",
    "404",
    "There is nothing of that name or id in the key's project.",
    ["sandbox_not_found", "there is no sandbox `my-app`", "`keep ls` lists sandboxes"],
);
const CONFLICT: Failure = (
    "Conflict",
    "409",
    "It cannot be done in the present state.",
    [
        "name_taken",
        "there is a sandbox `my-app`",
        "use another name, or `if_exists: get` to get the one there is",
    ],
);
const TOO_LARGE: Failure = (
    "TooLarge",
    "413",
    "The body is larger than the route takes, or does not fit into a disk limit.",
    ["too_large", "the JSON body is over 1048576 bytes", "send large data as files"],
);
const TOO_MANY: Failure = (
    "TooMany",
    "429",
    "Too many requests or too much work at a time. `Retry-After` gives the seconds to wait.",
    ["rate_limited", "too many requests with this key", "wait 1 s and make fewer at a time"],
);
const OTHER: Failure = (
    "Failure",
    "default",
    "What went wrong, and what to do about it. docs/API.md lists all codes.",
    [
        "shutting_down",
        "the server is shutting down",
        "sandboxes keep running; retry when the server is back",
    ],
);

const ALL: [Failure; 8] =
    [INVALID, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, TOO_LARGE, TOO_MANY, OTHER];

/// The responses that operations refer to.
pub(super) fn responses() -> impl Iterator<Item = (String, RefOr<Response>)> {
    ALL.into_iter().map(|failure| (failure.0.to_owned(), RefOr::T(described(failure))))
}

fn described((_, status, description, [code, message, hint]): Failure) -> Response {
    let example: Value = json!({"error": {"code": code, "message": message, "hint": hint}});
    let content: Content = ContentBuilder::new()
        .schema(Some(Ref::from_schema_name("ErrorAnswer")))
        .example(Some(example))
        .build();
    let response =
        ResponseBuilder::new().description(description).content("application/json", content);
    if status != "429" {
        return response.build();
    }
    let seconds = ObjectBuilder::new().schema_type(Type::Integer).build();
    let header = HeaderBuilder::new()
        .schema(Some(seconds))
        .description(Some("How many seconds to wait before a retry."))
        .build();
    response.header("Retry-After", header).build()
}

/// Adds the failures that an operation may answer with and does not describe itself.
pub(super) fn add(operation: &mut Operation, path: &str, changes: bool) {
    let open = operation.security.as_ref().is_some_and(|security| {
        security.iter().all(|one| serde_json::to_value(one).is_ok_and(|one| one == json!({})))
    });
    for failure in ALL {
        let applies = match failure.1 {
            "401" | "403" => !open,
            "404" => path.contains('{'),
            "409" => changes,
            "413" => operation.request_body.is_some(),
            _ => true,
        };
        let responses = &mut operation.responses.responses;
        if applies && !responses.contains_key(failure.1) {
            let reference = Ref::from_response_name(failure.0);
            responses.insert(failure.1.to_owned(), RefOr::Ref(reference));
        }
    }
}
