//! The flags of instructions, `--name=value`, and the mounts of `RUN`.

/// A cache that a `RUN` finds again the next time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMount {
    /// Which cache.
    pub id: String,
    /// Where it is.
    pub target: String,
    /// Mode of its directory.
    pub mode: Option<u32>,
    /// Owner of its directory.
    pub owner: Option<(u32, u32)>,
}

/// A secret that a `RUN` is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretMount {
    /// Which secret.
    pub id: String,
    /// The file it is in; none if it is only in the environment.
    pub target: Option<String>,
    /// The variable it is in.
    pub env: Option<String>,
    /// Whether the build fails without it.
    pub required: bool,
}

/// What a `RUN` has besides its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunMount {
    /// A cache.
    Cache(CacheMount),
    /// A secret.
    Secret(SecretMount),
}

/// Names and values.
type Fields = Vec<(String, Option<String>)>;

/// Takes the flags at the beginning of an instruction.
pub(super) fn take(text: &str) -> Result<(Fields, &str), String> {
    let mut flags = Vec::new();
    let mut rest = text.trim_start();
    while let Some(flag) = rest.strip_prefix("--") {
        // A value may be in quotes, but no known flag needs a blank in it.
        let end = flag.find(char::is_whitespace).unwrap_or(flag.len());
        let (flag, after) = flag.split_at(end);
        rest = after.trim_start();
        if flag.is_empty() {
            break;
        }
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.trim_matches('"').to_owned())),
            None => (flag, None),
        };
        let repeats = name == "mount" || !flags.iter().any(|(there, _)| there == name);
        if !repeats {
            return Err(format!("`--{name}` is given more than once"));
        }
        flags.push((name.to_owned(), value));
    }
    Ok((flags, rest))
}

/// The value of a flag that must have one.
pub(super) fn valued(name: &str, value: Option<String>) -> Result<String, String> {
    value.filter(|value| !value.is_empty()).ok_or_else(|| format!("`--{name}` needs a value"))
}

/// A flag that is on or off.
pub(super) fn switch(name: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(other) => Err(format!("`--{name}`: `{other}` is not `true` or `false`")),
    }
}

/// Permission bits in octal.
pub(super) fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text.trim_start_matches("0o"), 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(format!("`{text}` is not a mode in octal, like `755`")),
    }
}

/// The value of `--mount`.
pub(super) fn mount(text: &str) -> Result<RunMount, String> {
    let mut kind = None;
    let mut fields = Vec::new();
    for field in text.split(',').filter(|field| !field.is_empty()) {
        let (key, value) = match field.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (field, None),
        };
        let key = key.trim().to_ascii_lowercase();
        match key.as_str() {
            "type" => kind = value,
            _ => fields.push((key, value.map(|value| value.trim_matches('"').to_owned()))),
        }
    }
    match kind {
        Some("cache") => cache(fields).map(RunMount::Cache),
        Some("secret") => secret(fields).map(RunMount::Secret),
        other => Err(format!(
            "`--mount=type={}` is not supported; there are `cache` and `secret`",
            other.unwrap_or("bind")
        )),
    }
}

fn cache(fields: Fields) -> Result<CacheMount, String> {
    let (mut id, mut target, mut permissions, mut uid, mut gid) = (None, None, None, None, None);
    for (key, value) in fields {
        let number = |value: Option<String>| -> Result<u32, String> {
            let text = value.unwrap_or_default();
            text.parse().map_err(|_| format!("`{key}={text}`: use a number"))
        };
        match key.as_str() {
            "id" => id = value,
            "target" | "dst" | "destination" => target = value,
            "mode" => permissions = Some(mode(&value.unwrap_or_default())?),
            "uid" => uid = Some(number(value)?),
            "gid" => gid = Some(number(value)?),
            // One step at a time uses a cache, which all of them allow.
            "sharing" => match value.as_deref() {
                Some("shared" | "locked" | "private") => {}
                _ => return Err("`sharing`: use `shared`, `locked` or `private`".to_owned()),
            },
            _ => return Err(format!("`{key}` of a cache mount is not supported")),
        }
    }
    let target =
        target.filter(|target| !target.is_empty()).ok_or("a cache mount needs `target`")?;
    Ok(CacheMount {
        id: id.filter(|id| !id.is_empty()).unwrap_or_else(|| target.clone()),
        target,
        mode: permissions,
        owner: (uid.is_some() || gid.is_some()).then(|| (uid.unwrap_or(0), gid.unwrap_or(0))),
    })
}

fn secret(fields: Fields) -> Result<SecretMount, String> {
    let (mut id, mut target, mut env, mut required) = (None, None, None, false);
    for (key, value) in fields {
        match key.as_str() {
            "id" => id = value,
            "target" | "dst" | "destination" => target = value,
            "env" => env = value,
            "required" => required = switch("required", value.as_deref())?,
            // The file belongs to the command's user and nobody else may read it.
            "mode" | "uid" | "gid" => {}
            _ => return Err(format!("`{key}` of a secret mount is not supported")),
        }
    }
    let name = |path: &String| path.rsplit('/').next().unwrap_or(path).to_owned();
    let id = id.or_else(|| target.as_ref().map(name)).filter(|id| !id.is_empty());
    let id = id.ok_or("a secret mount needs `id`")?;
    let target = match (target, &env) {
        (Some(target), _) if target.starts_with('/') => Some(target),
        (Some(target), _) => Some(format!("/run/secrets/{target}")),
        (None, Some(_)) => None,
        (None, None) => Some(format!("/run/secrets/{id}")),
    };
    if let Some(target) = &target
        && !["/run/", "/dev/shm/"].iter().any(|memory| target.starts_with(memory))
    {
        return Err(format!(
            "the secret's target `{target}` is not supported, because secrets are kept in memory only: \
             use a path below /run, like /run/secrets/{id}, or `env=NAME`"
        ));
    }
    Ok(SecretMount { id, target, env, required })
}
