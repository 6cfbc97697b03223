//! The log of `keep serve`: lines for people, or JSON for programs.
//!
//! A JSON line is one flat object: `time`, `level`, `target`, `message`, the fields of the line, and those of the spans it is
//! in, which is where `request_id` comes from.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::str::FromStr;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer};

use crate::failure::Failure;
use crate::screen::Paint;

/// How lines of the log are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// A JSON object per line
    Json,
}

impl FromStr for LogFormat {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(Failure::here(format!("log_format: there is no format `{text}`"))
                .with_hint("write `text` or `json`")),
        }
    }
}

/// Starts the log, on standard error.
pub(crate) fn start(filter: &str, format: LogFormat) -> Result<(), Failure> {
    let hint = "write error, warn, info, debug or trace, or a filter like `sandkeep_core=debug`";
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| Failure::caused("invalid log filter", error).with_hint(hint))?;
    let log = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Json => log.with(JsonLines).init(),
        LogFormat::Text => {
            let colours = Paint::for_errors() == Paint::of(true) && std::io::stderr().is_terminal();
            let lines = tracing_subscriber::fmt::layer();
            log.with(lines.with_writer(std::io::stderr).with_ansi(colours)).init();
        }
    }
    Ok(())
}

/// Writes every event as a line of JSON on standard error.
struct JsonLines;

/// The fields of a span.
struct SpanFields(Map<String, Value>);

impl<S> Layer<S> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = LogFields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(SpanFields(fields.0));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = LogFields::default();
        values.record(&mut fields);
        if let Some(known) = span.extensions_mut().get_mut::<SpanFields>() {
            known.0.extend(fields.0);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut spans = Map::new();
        for span in context.event_scope(event).into_iter().flatten() {
            // From the innermost on: what it says counts.
            if let Some(SpanFields(fields)) = span.extensions().get() {
                for (name, value) in fields {
                    spans.entry(name.clone()).or_insert_with(|| value.clone());
                }
            }
        }
        let line = line(event, spans);
        // Nothing can be done if standard error is gone.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
}

fn line(event: &Event<'_>, spans: Map<String, Value>) -> String {
    let mut fields = LogFields::default();
    event.record(&mut fields);
    let mut fields = fields.0;
    let metadata = event.metadata();
    let mut object = Map::new();
    object.insert("time".to_owned(), jiff::Timestamp::now().to_string().into());
    object.insert("level".to_owned(), metadata.level().as_str().to_ascii_lowercase().into());
    object.insert("target".to_owned(), metadata.target().into());
    object.insert("message".to_owned(), fields.remove("message").unwrap_or_default());
    for (name, value) in fields.into_iter().chain(spans) {
        object.entry(name).or_insert(value);
    }
    format!("{}\n", Value::Object(object))
}

/// Collects fields as JSON.
#[derive(Default)]
struct LogFields(Map<String, Value>);

impl LogFields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().trim_start_matches("r#").to_owned(), value.into());
    }
}

impl Visit for LogFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, sandkeep_client::types::error_chain(value));
    }
}
