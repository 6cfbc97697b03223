//! Examples of requests and responses: `openapi/examples.json`, by operation.

use std::sync::LazyLock;

use serde_json::{Map, Value};
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Content, RefOr};

const TEXT: &str = include_str!("../../../../openapi/examples.json");

static EXAMPLES: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_str(TEXT).unwrap_or_default());

/// Adds an operation's examples.
pub(super) fn add(operation: &mut Operation) {
    let Some(examples) = operation.operation_id.as_ref().and_then(|id| EXAMPLES.get(id)) else {
        return;
    };
    let body = operation.request_body.as_mut();
    if let (Some(example), Some(RefOr::T(body))) = (examples.get("request"), body)
        && let Some(RefOr::T(content)) = body.content.get_mut("application/json")
    {
        content.example = Some(example.clone());
    }
    let Some(example) = examples.get("response") else { return };
    let responses = operation.responses.responses.iter_mut();
    for (_, response) in responses.filter(|(status, _)| status.starts_with('2')) {
        let RefOr::T(response) = response else { continue };
        if let Some(RefOr::T(content)) = response.content.get_mut("application/json") {
            set(content, example);
        }
    }
}

fn set(content: &mut Content, example: &Value) {
    content.example = Some(example.clone());
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::EXAMPLES;

    #[test]
    fn every_json_request_has_an_example_and_every_example_its_operation() {
        let document: Value = serde_json::from_str(&crate::openapi::json()).unwrap();
        let items = document["paths"].as_object().unwrap().values();
        let operations: Vec<&Value> =
            items.flat_map(|item| item.as_object().unwrap().values()).collect();
        let id = |operation: &Value| operation["operationId"].as_str().unwrap().to_owned();
        let lacking: Vec<String> = operations
            .iter()
            .filter(|operation| {
                let json = &operation["requestBody"]["content"]["application/json"];
                json.is_object() && json["example"].is_null()
            })
            .map(|operation| id(operation))
            .collect();
        assert!(lacking.is_empty(), "openapi/examples.json lacks requests of {lacking:?}");
        for known in EXAMPLES.keys() {
            assert!(operations.iter().any(|one| id(one) == *known), "there is no `{known}`");
        }
    }
}
