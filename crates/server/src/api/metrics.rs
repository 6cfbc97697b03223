//! Metrics in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use sandkeep_core::engine::{Figures, Latency};

use super::App;
use super::input::Params;
use crate::auth::Admin;
use crate::connections::ConnectionCounts;
use crate::error::ApiError;
use crate::meters::{BOUNDS, CLASSES, FRONTS, HttpMeters};

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
    let mut page = Page(String::new());
    engine(&mut page, &figures, is_healthy, recovering);
    latencies(&mut page, &app.engine.latencies());
    http(&mut page, &app.http);
    connections(&mut page, app.connections.counts(), &app);
    process(&mut page);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4")], page.0).into_response())
}

fn engine(page: &mut Page, figures: &Figures, is_healthy: bool, recovering: usize) {
    page.metric("sandkeep_build_info", "gauge", "The version of the server.");
    page.value("sandkeep_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.single("sandkeep_healthy", "gauge", "1 if the data directory takes writes.", {
        u8::from(is_healthy)
    });
    page.single(
        "sandkeep_recovering",
        "gauge",
        "Sandboxes that still have to be recovered after a restart.",
        recovering,
    );
    page.by("sandkeep_sandboxes", "gauge", "Sandboxes by state.", "state", &figures.sandboxes);
    page.by(
        "sandkeep_damage",
        "gauge",
        "Known damage to stored data by kind; see keep doctor.",
        "kind",
        &figures.damage,
    );
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
    let traffic =
        BTreeMap::from([("received", figures.network_received), ("sent", figures.network_sent)]);
    let help = "Bytes that sandboxes received and sent since the start.";
    page.by("sandkeep_network_bytes_total", "counter", help, "direction", &traffic);
    let help = "What waits in the warm pools, by pool.";
    page.by("sandkeep_warm_pool", "gauge", help, "pool", &figures.warm_pools);
}

fn latencies(page: &mut Page, all: &[Latency]) {
    const NAME: &str = "sandkeep_operation_seconds";
    page.metric(NAME, "histogram", "How long operations on sandboxes took.");
    for one in all {
        let labels =
            [("operation", one.operation), ("driver", one.driver), ("outcome", one.outcome)];
        page.histogram(NAME, &labels, &one.buckets, one.count, one.sum);
    }
}

fn http(page: &mut Page, http: &HttpMeters) {
    const REQUESTS: &str = "sandkeep_http_requests_total";
    page.metric(REQUESTS, "counter", "Requests that were answered, by front and class of status.");
    for (front, name) in FRONTS.iter().enumerate() {
        for (class, word) in CLASSES.iter().enumerate() {
            let count = http.requests(front, class);
            page.value(REQUESTS, &[("front", name), ("status", word)], count);
        }
    }
    const TOOK: &str = "sandkeep_http_request_seconds";
    page.metric(TOOK, "histogram", "How long requests took until their answer began, by front.");
    for (front, name) in FRONTS.iter().enumerate() {
        let (counts, count, sum) = http.took(front);
        let bounds = BOUNDS.iter().map(|ms| seconds(*ms, 1e3));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        page.histogram(TOOK, &[("front", name)], &buckets, count, seconds(sum, 1e6));
    }
    page.single(
        "sandkeep_http_requests_in_flight",
        "gauge",
        "Requests whose answer has not begun.",
        http.under_way(),
    );
    page.by(
        "sandkeep_http_errors_total",
        "counter",
        "Errors that were answered, by code.",
        "code",
        &http.errors(),
    );
}

fn connections(page: &mut Page, counts: ConnectionCounts, app: &App) {
    let open = BTreeMap::from([("tcp", counts.tcp as u64), ("unix", counts.unix as u64)]);
    page.by("sandkeep_connections", "gauge", "Open connections.", "listener", &open);
    page.single(
        "sandkeep_connections_displaced_total",
        "counter",
        "Idle connections that were closed to make room for others.",
        counts.displaced,
    );
    page.single(
        "sandkeep_connections_refused_total",
        "counter",
        "Connections that found no room.",
        counts.refused,
    );
    let Some(tls) = &app.tls else { return };
    page.single(
        "sandkeep_tls_handshakes_failed_total",
        "counter",
        "TLS handshakes that failed.",
        app.http.handshakes_failed.load(Ordering::Relaxed),
    );
    page.single(
        "sandkeep_tls_certificate_expires_seconds",
        "gauge",
        "When the certificate in use expires, in seconds since 1970.",
        tls.ends().as_second(),
    );
}

/// What Prometheus' own libraries report about a process, under their names.
fn process(page: &mut Page) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: Option<u64> =
        resident.and_then(|text| text.split_whitespace().next()?.parse().ok());
    if let Some(kilobytes) = kilobytes {
        let help = "Memory of the server that is in RAM.";
        page.single("process_resident_memory_bytes", "gauge", help, kilobytes * 1024);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        page.single("process_open_fds", "gauge", "Open file descriptors.", files.count());
    }
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(most) = most {
        page.single("process_max_fds", "gauge", "How many there may be.", most);
    }
    // After the name, which is in brackets: utime and stime are the 12th and 13th field, in units of 10 ms on every Linux.
    let stat = read("/proc/self/stat");
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|text| text.parse::<u64>().ok()).sum();
    let help = "CPU time of the server.";
    page.single("process_cpu_seconds_total", "counter", help, seconds(ticks, 100.0));
}

#[allow(clippy::cast_precision_loss)]
fn seconds(whole: u64, parts: f64) -> f64 {
    whole as f64 / parts
}

struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels = labelled(labels);
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.metric(name, kind, help);
        self.value(name, &[], value);
    }

    fn by<K: AsRef<str>>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        label: &str,
        values: &BTreeMap<K, u64>,
    ) {
        self.metric(name, kind, help);
        for (word, value) in values {
            self.value(name, &[(label, word.as_ref())], value);
        }
    }

    fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        buckets: &[(f64, u64)],
        count: u64,
        sum: f64,
    ) {
        let at = |bound: &str| labelled(&[labels, &[("le", bound)]].concat());
        for (bound, value) in buckets {
            let labels = at(&bound.to_string());
            let _ = writeln!(self.0, "{name}_bucket{labels} {value}");
        }
        let (all, labels) = (at("+Inf"), labelled(labels));
        let _ = writeln!(self.0, "{name}_bucket{all} {count}");
        let _ = writeln!(self.0, "{name}_sum{labels} {sum}\n{name}_count{labels} {count}");
    }
}

/// Labels as they are written. Their values are words of this program.
fn labelled(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let pairs: Vec<String> = labels.iter().map(|(key, word)| format!("{key}=\"{word}\"")).collect();
    format!("{{{}}}", pairs.join(","))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use sandkeep_core::engine::{Figures, Latency};

    use super::{Page, engine, http, latencies, process};
    use crate::meters::HttpMeters;

    fn page() -> String {
        let figures = Figures {
            sandboxes: BTreeMap::from([("running", 2), ("stopped", 5)]),
            damage: BTreeMap::from([("missing", 1)]),
            events: 7,
            warm_pools: BTreeMap::from([("container", 2)]),
            ..Figures::default()
        };
        let latency = Latency {
            operation: "start",
            driver: "container",
            outcome: "ok",
            buckets: vec![(0.001, 0), (0.0025, 3), (1.0, 4)],
            count: 5,
            sum: 2.5,
        };
        let mut page = Page(String::new());
        engine(&mut page, &figures, false, 3);
        latencies(&mut page, &[latency]);
        http(&mut page, &HttpMeters::default());
        process(&mut page);
        page.0
    }

    #[test]
    fn every_line_is_a_comment_or_a_value() {
        let page = page();
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
            "sandkeep_warm_pool{pool=\"container\"} 2\n",
            "sandkeep_operation_seconds_bucket{operation=\"start\",driver=\"container\",outcome=\"ok\",le=\"0.0025\"} 3\n",
            "sandkeep_operation_seconds_bucket{operation=\"start\",driver=\"container\",outcome=\"ok\",le=\"+Inf\"} 5\n",
            "sandkeep_operation_seconds_sum{operation=\"start\",driver=\"container\",outcome=\"ok\"} 2.5\n",
            "sandkeep_http_requests_total{front=\"gateway\",status=\"5xx\"} 0\n",
        ] {
            assert!(page.contains(wanted), "{wanted} in {page}");
        }
        let cpu = page.lines().find_map(|line| line.strip_prefix("process_cpu_seconds_total "));
        assert!(
            cpu.is_some_and(|text| text.parse::<f64>().is_ok_and(|spent| spent >= 0.0)),
            "{page}"
        );
    }

    #[test]
    fn every_metric_is_in_the_documented_table_and_the_other_way_round() {
        let text = include_str!("../../../../docs/OPERATIONS.md");
        let named =
            |line: &str| Some(line.strip_prefix("| `")?.split(['`', '{']).next()?.to_owned());
        let is_ours = |name: &String| name.starts_with("sandkeep_") || name.starts_with("process_");
        let documented: BTreeSet<String> = text.lines().filter_map(named).filter(is_ours).collect();
        // Those of connections need a server; they are named here.
        let mut told: BTreeSet<String> = [
            "sandkeep_connections",
            "sandkeep_connections_displaced_total",
            "sandkeep_connections_refused_total",
            "sandkeep_tls_handshakes_failed_total",
            "sandkeep_tls_certificate_expires_seconds",
        ]
        .map(str::to_owned)
        .into();
        let page = page();
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        told.extend(types.filter_map(|line| Some(line.split_once(' ')?.0.to_owned())));
        assert_eq!(told, documented);
    }
}
