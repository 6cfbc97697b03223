//! Every setting is in the help of `keep serve`, and so in the settings file that packages install, with its real default.

use std::cell::RefCell;
use std::collections::BTreeSet;

use sandkeep_core::model::Config;
use sandkeep_server::Limits;
use serde::de::value::{Error, MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer as _, MapAccess, Visitor};
use serde::{Deserialize as _, forward_to_deserialize_any};

use super::{File, Resolved, resolve};
use crate::args::{Global, ServeArgs};
use crate::failure::Failure;
use crate::reference::{SettingLine, settings, settings_file};

/// Names that settings had in earlier versions.
const FORMER: [&str; 2] = ["spares", "ready"];

fn read(toml: &str) -> Result<Resolved, Failure> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keep.toml");
    std::fs::write(&path, toml).unwrap();
    // As for root, whichever user runs the tests.
    let named = toml.lines().any(|line| line.starts_with("data = "));
    let data = (!named).then(|| super::locate::SYSTEM_DATA.into());
    let global = Global { json: false, url: None, key: None, ca: None, project: None, data };
    resolve(&global, ServeArgs { config: Some(path), ..ServeArgs::default() })
}

/// The settings as the help has them: section and key, value, whether it is the default.
fn documented() -> Vec<(String, String, String, bool)> {
    let mut section = String::new();
    let mut all = Vec::new();
    for line in settings() {
        match line {
            SettingLine::Section { name, .. } => section = name.to_owned(),
            SettingLine::Setting { key, value, is_default, .. } => {
                all.push((section.clone(), key.to_owned(), value.to_owned(), is_default));
            }
        }
    }
    all
}

#[test]
fn no_setting_is_missing_in_the_settings_file() {
    let found = RefCell::default();
    File::deserialize(Tracer { path: String::new(), found: &found }).unwrap();
    let exist: BTreeSet<String> = found.into_inner();
    assert!(exist.contains("listen") && exist.contains("storage.trash_grace"), "{exist:?}");
    let told = documented().into_iter().map(|(section, key, ..)| {
        // A table, such as `hosts."git.internal"`.
        let key = key.split('.').next().unwrap_or_default().to_owned();
        if section.is_empty() { key } else { format!("{section}.{key}") }
    });
    let told: BTreeSet<String> = told.collect();
    assert_eq!(told, exist, "left: SERVE_HELP in args/server.rs; right: what config.rs reads");
}

#[test]
fn the_settings_file_is_valid_with_and_without_its_examples() {
    let file = settings_file();
    assert_eq!(read(&file).unwrap(), read("").unwrap());
    let is_setting =
        |line: &str| line.starts_with('#') && line.contains(" = ") && !line.starts_with("# ");
    let lines = file.lines().map(|line| match is_setting(line) {
        // The only one that names a file which must exist.
        true if line.starts_with("#ca = ") => line,
        true => &line[1..],
        false => line,
    });
    let all = lines.collect::<Vec<_>>().join("\n");
    let resolved = read(&all).unwrap();
    assert_eq!(resolved.network.hosts.len(), 1, "they are read: {all}");
    assert_eq!(resolved.vercel.images.len(), 2, "{all}");
}

#[test]
fn the_defaults_in_the_settings_file_are_the_real_ones() {
    let usual = read("").unwrap();
    let limits = Limits::default();
    // What the server and the engine fill in.
    let elsewhere = [
        ("api.connections", limits.connections.to_string()),
        ("api.connections_per_address", limits.connections_per_address.to_string()),
        ("api.connections_per_key", limits.connections_per_key.to_string()),
        ("defaults.driver", format!("\"{}\"", Config::default().driver)),
        ("vercel.default_image", format!("\"{}\"", sandkeep_core::store::image::HOST)),
    ];
    for (section, key, value, is_default) in documented() {
        let path = format!("{section}.{key}");
        if let Some((_, real)) = elsewhere.iter().find(|(other, _)| *other == path) {
            assert!(is_default && value == *real, "{path}: {value} is not {real}");
            continue;
        }
        let heading = if section.is_empty() { String::new() } else { format!("[{section}]\n") };
        let same = match read(&format!("{heading}{key} = {value}\n")) {
            Ok(resolved) => resolved == usual,
            // An example that names a file.
            Err(_) => false,
        };
        assert_eq!(
            same, is_default,
            "{path} = {value}: in SERVE_HELP, describe a setting without a default as `none by default; ...`"
        );
    }
}

/// Notes down every setting that is asked for, and answers with nothing.
struct Tracer<'a> {
    path: String,
    found: &'a RefCell<BTreeSet<String>>,
}

impl Tracer<'_> {
    fn note(&self) {
        self.found.borrow_mut().insert(self.path.clone());
    }
}

impl<'de> Deserializer<'de> for Tracer<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let fields = fields.iter().copied().filter(|field| !FORMER.contains(field)).collect();
        visitor.visit_map(Fields { of: self, fields, field: "" })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        let none = std::iter::empty::<(&str, &str)>();
        visitor.visit_map(MapDeserializer::new(none))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        let none = std::iter::empty::<&str>();
        visitor.visit_seq(SeqDeserializer::new(none))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        visitor.visit_bool(true)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        visitor.visit_u64(1)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        visitor.visit_f64(1.0)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.note();
        visitor.visit_str("text")
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u128 f32 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct enum identifier ignored_any
    }
}

/// All fields of a struct.
struct Fields<'a> {
    of: Tracer<'a>,
    fields: std::collections::VecDeque<&'static str>,
    field: &'static str,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let Some(field) = self.fields.pop_front() else { return Ok(None) };
        self.field = field;
        let name: StrDeserializer<'_, Error> = field.into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let path = match self.of.path.as_str() {
            "" => self.field.to_owned(),
            path => format!("{path}.{}", self.field),
        };
        seed.deserialize(Tracer { path, found: self.of.found })
    }
}
