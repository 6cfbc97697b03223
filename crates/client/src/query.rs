//! Paths and queries of requests.

use std::fmt::Write as _;

/// A request target under construction.
#[derive(Debug)]
pub(crate) struct Target {
    text: String,
    has_query: bool,
}

impl Target {
    /// Begins with `parts`, each escaped, joined by slashes under `/v1`.
    pub(crate) fn new(parts: &[&str]) -> Self {
        let mut text = String::from("/v1");
        for part in parts {
            text.push('/');
            escape(part, &mut text);
        }
        Self { text, has_query: false }
    }

    pub(crate) fn with(mut self, name: &str, value: impl AsRef<str>) -> Self {
        self.text.push(if self.has_query { '&' } else { '?' });
        self.has_query = true;
        escape(name, &mut self.text);
        self.text.push('=');
        escape(value.as_ref(), &mut self.text);
        self
    }

    pub(crate) fn maybe(self, name: &str, value: Option<impl AsRef<str>>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    pub(crate) fn flag(self, name: &str, set: bool) -> Self {
        match set {
            true => self.with(name, "true"),
            false => self,
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }
}

impl From<Target> for String {
    fn from(target: Target) -> String {
        target.text
    }
}

fn escape(text: &str, into: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                into.push(char::from(byte));
            }
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(into, "%{byte:02X}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Target;

    #[test]
    fn what_has_a_meaning_in_urls_is_escaped() {
        let target = Target::new(&["images", "a/b:1"]).with("path", "/x y&z").flag("all", true);
        assert_eq!(target.as_str(), "/v1/images/a%2Fb%3A1?path=%2Fx%20y%26z&all=true");
    }
}
