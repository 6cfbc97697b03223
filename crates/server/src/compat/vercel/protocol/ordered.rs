//! JSON whose objects keep the order they were written in.
//!
//! Their clients compare the answer with what they sent, and order matters to some of it: the
//! domains of a network policy are keys of an object there, and items of a list in the answer.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// A JSON document.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ordered {
    Object(Vec<(String, Ordered)>),
    Array(Vec<Ordered>),
    /// Neither.
    Plain(Value),
}

impl Ordered {
    /// What an object has under a name; the last, if it has several, as everywhere else.
    pub(crate) fn get(&self, name: &str) -> Option<&Self> {
        self.entries().iter().rev().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// The entries of an object; none of anything else.
    pub(crate) fn entries(&self) -> &[(String, Self)] {
        match self {
            Self::Object(entries) => entries,
            Self::Array(_) | Self::Plain(_) => &[],
        }
    }

    /// The items of an array; none of anything else.
    pub(crate) fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) => items,
            Self::Object(_) | Self::Plain(_) => &[],
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Plain(value) => value.as_str(),
            Self::Object(_) | Self::Array(_) => None,
        }
    }

    /// The document without its order.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Self::Object(entries) => {
                entries.iter().map(|(key, value)| (key.clone(), value.to_value())).collect()
            }
            Self::Array(items) => items.iter().map(Self::to_value).collect(),
            Self::Plain(value) => value.clone(),
        }
    }
}

impl From<Value> for Ordered {
    fn from(value: Value) -> Self {
        match value {
            Value::Object(map) => {
                Self::Object(map.into_iter().map(|(key, value)| (key, value.into())).collect())
            }
            Value::Array(items) => Self::Array(items.into_iter().map(Self::from).collect()),
            plain => Self::Plain(plain),
        }
    }
}

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reading)
    }
}

struct Reading;

impl<'de> Visitor<'de> for Reading {
    type Value = Ordered;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Ordered::Object(entries))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ordered, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Ordered::Array(items))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Ordered, E> {
        Ok(Ordered::Plain(value.into()))
    }

    fn visit_unit<E>(self) -> Result<Ordered, E> {
        Ok(Ordered::Plain(Value::Null))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::Ordered;

    #[test]
    fn objects_keep_their_order_and_mean_the_same() {
        let text =
            r#"{"b":[1,-2,0.5,true,null,"x",{"z":{},"y":[]}],"a":{},"b2":18446744073709551615}"#;
        let read: Ordered = serde_json::from_str(text).unwrap();
        let keys: Vec<&str> = read.entries().iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["b", "a", "b2"]);
        assert_eq!(read.to_value(), serde_json::from_str::<Value>(text).unwrap());
        let twice: Ordered = serde_json::from_str(r#"{"a":1,"a":2}"#).unwrap();
        assert_eq!(twice.get("a").unwrap().to_value(), 2);
        assert_eq!(twice.to_value()["a"], 2);
        assert!(serde_json::from_str::<Ordered>(&"[".repeat(100_000)).is_err(), "no deep end");
    }
}
