//! Figures in the text format of Prometheus.

use std::fmt::{Display, Write as _};
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use sandkeep_core::engine::Figures;

use super::App;
use super::input::Params;
use crate::auth::Admin;
use crate::error::ApiError;

/// Figures about the server, for Prometheus. Needs an admin key, because they cover all projects.
#[utoipa::path(get, path = "/metrics", tag = "server", operation_id = "metrics",
    responses((status = 200, description = "Prometheus text format.", body = String, content_type = "text/plain")))]
pub(crate) async fn metrics(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
) -> Result<Response, ApiError> {
    params.end()?;
    let figures = app.engine.figures().await?;
    let is_healthy = app.engine.health().is_ok();
    let recovering = app.engine.recovering();
    let text = text(&figures, is_healthy, recovering);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

fn text(figures: &Figures, is_healthy: bool, recovering: usize) -> String {
    let mut page = Page(String::new());
    page.metric("sandkeep_build_info", "gauge", "The version of the server.");
    page.value("sandkeep_build_info", Some(("version", env!("CARGO_PKG_VERSION"))), 1);
    page.single("sandkeep_healthy", "gauge", "1 if the data directory takes writes.", {
        u8::from(is_healthy)
    });
    page.single(
        "sandkeep_recovering",
        "gauge",
        "Sandboxes that still have to be recovered after a restart.",
        recovering,
    );
    page.metric("sandkeep_sandboxes", "gauge", "Sandboxes by state.");
    for (state, count) in &figures.sandboxes {
        page.value("sandkeep_sandboxes", Some(("state", state)), count);
    }
    page.metric(
        "sandkeep_damage",
        "gauge",
        "Known damage to stored data by kind; see keep doctor.",
    );
    for (kind, count) in &figures.damage {
        page.value("sandkeep_damage", Some(("kind", kind)), count);
    }
    let disk = "filesystem under the data directory";
    page.single("sandkeep_disk_total_bytes", "gauge", &format!("Size of the {disk}."), {
        figures.disk_total
    });
    page.single("sandkeep_disk_free_bytes", "gauge", &format!("Free on the {disk}."), {
        figures.disk_free
    });
    page.single(
        "sandkeep_layers_bytes",
        "gauge",
        "Sealed layers, each counted once.",
        figures.layers,
    );
    page.single(
        "sandkeep_trash_bytes",
        "gauge",
        "Deleted data that is still in the trash.",
        figures.trash,
    );
    page.single("sandkeep_events_total", "counter", "Events since the start.", figures.events);
    page.single(
        "sandkeep_events_lost_total",
        "counter",
        "Events that could not be written since the start.",
        figures.events_lost,
    );
    page.0
}

struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, label: Option<(&str, &str)>, value: impl Display) {
        let _ = match label {
            Some((key, word)) => writeln!(self.0, "{name}{{{key}=\"{word}\"}} {value}"),
            None => writeln!(self.0, "{name} {value}"),
        };
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.metric(name, kind, help);
        self.value(name, None, value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use sandkeep_core::engine::Figures;

    use super::text;

    #[test]
    fn every_line_is_a_comment_or_a_value() {
        let figures = Figures {
            sandboxes: BTreeMap::from([("running", 2), ("stopped", 5)]),
            damage: BTreeMap::from([("missing", 1)]),
            events: 7,
            ..Figures::default()
        };
        let page = text(&figures, false, 3);
        for line in page.lines() {
            let is_comment = line.starts_with("# HELP ") || line.starts_with("# TYPE ");
            let value = line.rsplit_once(' ').map(|(_, value)| value.parse::<f64>().is_ok());
            assert!(is_comment || value == Some(true), "{line}");
        }
        for wanted in [
            "sandkeep_sandboxes{state=\"running\"} 2\n",
            "sandkeep_damage{kind=\"missing\"} 1\n",
            "sandkeep_healthy 0\n",
            "sandkeep_events_total 7\n",
        ] {
            assert!(page.contains(wanted), "{wanted} in {page}");
        }
    }
}
