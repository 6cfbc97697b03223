//! Checks requests about secrets, as far as is possible without knowing the secrets.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::{Error, Result, SetSecret};
use crate::model::{
    Inject, InjectInto, LONGEST_SECRET, SHORTEST_SECRET, check_env_name, check_tag,
};

/// Checks a value that is to be set.
pub(in crate::engine) fn check(set: &SetSecret) -> Result<()> {
    let length = set.value.len();
    if length < SHORTEST_SECRET {
        let reason = format!("under {SHORTEST_SECRET} bytes it could not be told from other text");
        return Err(Error::invalid("value", reason));
    }
    if length > LONGEST_SECRET {
        return Err(Error::invalid("value", format!("at most {} KiB", LONGEST_SECRET >> 10)));
    }
    if set.value.contains('\0') {
        return Err(Error::invalid("value", "no environment can hold a NUL byte"));
    }
    if set.hosts.as_ref().is_some_and(|hosts| hosts.len() > 64) {
        return Err(Error::invalid("hosts", "at most 64"));
    }
    let tags = set.tags.iter().flatten();
    if tags.clone().count() > 32 {
        return Err(Error::invalid("tags", "at most 32"));
    }
    for (key, value) in tags {
        check_tag(key, value).map_err(|error| Error::invalid("tags", error.to_string()))?;
    }
    Ok(())
}

/// Checks the secrets that a command is to get, as far as is possible without knowing them.
pub(in crate::engine) fn check_inject(
    inject: &[Inject],
    env: &BTreeMap<String, String>,
) -> Result<()> {
    if inject.len() > 64 {
        return Err(Error::invalid("inject", "at most 64"));
    }
    let mut places = BTreeSet::new();
    for Inject { into, .. } in inject {
        let place = match into {
            InjectInto::Env(name) => {
                check_env_name(name)
                    .map_err(|error| Error::invalid("inject", error.to_string()))?;
                if env.contains_key(name) {
                    let reason = format!("the variable `{name}` is in `env` too");
                    return Err(Error::invalid("inject", reason));
                }
                name
            }
            InjectInto::File(path) => {
                let inside = path.strip_prefix("/run/").or_else(|| path.strip_prefix("/dev/shm/"));
                let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
                if path.len() > 1024
                    || path.contains('\0')
                    || !inside.is_some_and(|rest| rest.split('/').all(plain))
                {
                    let reason = format!(
                        "`{path}` is no place in memory: name a file below /run or /dev/shm"
                    );
                    return Err(Error::invalid("inject", reason));
                }
                path
            }
        };
        if !places.insert(place) {
            return Err(Error::invalid("inject", format!("`{place}` is there twice")));
        }
    }
    Ok(())
}
