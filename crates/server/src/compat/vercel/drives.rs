//! Drives and where they are mounted.

use sandkeep_core::model::{Mount, Mounts};
use serde_json::Value;

use super::error::VercelError;

/// Reads `mounts` of a request: drives by path.
pub(super) fn mounts_in(value: &Value) -> Result<Mounts, VercelError> {
    let Value::Object(map) = value else {
        return Err(VercelError::bad("`mounts` should be object."));
    };
    if map.len() > 4 {
        return Err(VercelError::bad("`mounts` should NOT have more than 4 properties."));
    }
    let mount = |(path, value): (&String, &Value)| {
        let mount: Mount = serde_json::from_value(value.clone())
            .map_err(|error| VercelError::bad(format!("`mounts.{path}`: {error}.")))?;
        Ok((path.clone(), mount))
    };
    map.iter().map(mount).collect()
}

/// `mounts` of an answer, if there are any.
pub(super) fn mounts_out(mounts: &Mounts) -> Option<Value> {
    (!mounts.is_empty()).then(|| serde_json::to_value(mounts).ok()).flatten()
}
