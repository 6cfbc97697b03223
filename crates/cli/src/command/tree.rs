//! The lineage of a sandbox, drawn.
//!
//! ```text
//! my-app  host
//! └─ g1 snp-…  stop  344.0 MiB  2h ago
//!    ├─ g2 snp-…  checkpoint "tests green"  ← my-app
//!    └─ try-a  running
//! ```
//!
//! Snapshots hang below their parents; a sandbox stands beside the snapshot that it wakes from, and
//! one that wakes from no snapshot hangs below its image. A table of the forks follows: what has become of each, those in the
//! trash included, and what deleting it would free.

use std::collections::BTreeMap;

use sandkeep_client::types::{Sandbox, Snapshot, Tree, TreeFork};

use super::{Context, bytes, for_each, word};
use crate::failure::Failure;
use crate::screen::{Paint, Table, state_colour};
use crate::when;

pub(super) async fn tree(context: &Context, names: &[String]) -> Result<(), Failure> {
    for_each(context, names, async |name| {
        let tree = context.client.tree(&name).await?;
        context.screen.answer(&tree, |tree| {
            let mut text = drawn(context.screen.paint, tree, &name);
            if !tree.forks.is_empty() {
                text.push_str(&format!("\n{}", context.screen.table(&forks_table(&tree.forks))));
            }
            text
        })
    })
    .await
}

struct Drawing<'a> {
    paint: Paint,
    asked: &'a str,
    children: BTreeMap<Option<&'a str>, Vec<&'a Snapshot>>,
    awake_from: BTreeMap<Option<&'a str>, Vec<&'a Sandbox>>,
    text: String,
}

fn drawn(paint: Paint, tree: &Tree, asked: &str) -> String {
    let known = |id: &str| tree.snapshots.iter().any(|snapshot| snapshot.id == id);
    let mut drawing = Drawing {
        paint,
        asked,
        children: BTreeMap::new(),
        awake_from: BTreeMap::new(),
        text: String::new(),
    };
    for snapshot in &tree.snapshots {
        // A parent that was deleted leaves its children at the top.
        let parent = snapshot.parent.as_deref().filter(|id| known(id));
        drawing.children.entry(parent).or_default().push(snapshot);
    }
    for snapshots in drawing.children.values_mut() {
        snapshots.sort_by(|a, b| (&a.created_at, &a.id).cmp(&(&b.created_at, &b.id)));
    }
    for sandbox in &tree.sandboxes {
        let from = sandbox.current_snapshot.as_deref().filter(|id| known(id));
        drawing.awake_from.entry(from).or_default().push(sandbox);
    }
    let image = tree.sandboxes.iter().find(|sandbox| sandbox.name == asked);
    let image = image.map_or("image", |sandbox| sandbox.image.as_str());
    drawing.text.push_str(&format!("{}\n", paint.bold(image)));
    drawing.below(None, "");
    drawing.text
}

fn forks_table(forks: &[TreeFork]) -> Table {
    let mut table = Table::new(&["FORK", "ORIGIN", "FATE", "FREED IF DELETED"]);
    for fork in forks {
        let place = if fork.in_trash { ", in the trash" } else { "" };
        table.row(vec![
            fork.name.clone(),
            fork.origin.clone(),
            format!("{}{place}", word(fork.fate)),
            bytes(fork.freed_if_deleted_bytes),
        ]);
    }
    table
}

impl Drawing<'_> {
    fn below(&mut self, node: Option<&str>, indent: &str) {
        let sandboxes: Vec<&Sandbox> = match node {
            None => self.awake_from.get(&None).cloned().unwrap_or_default(),
            // Those at a snapshot are printed on its own line.
            Some(_) => Vec::new(),
        };
        let snapshots = self.children.get(&node).cloned().unwrap_or_default();
        let count = sandboxes.len() + snapshots.len();
        let mut drawn = 0;
        let mut branch = |text: &mut String, line: &str| {
            drawn += 1;
            let (joint, more) =
                if drawn == count { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            text.push_str(&format!("{indent}{joint}{line}\n"));
            format!("{indent}{more}")
        };
        for sandbox in sandboxes {
            let line = self.sandbox_line(sandbox);
            branch(&mut self.text, &line);
        }
        for snapshot in snapshots {
            let line = self.snapshot_line(snapshot);
            let deeper = branch(&mut self.text, &line);
            let id = snapshot.id.clone();
            self.below(Some(&id), &deeper);
        }
    }

    fn snapshot_line(&self, snapshot: &Snapshot) -> String {
        let Snapshot { id, generation, created_at, .. } = snapshot;
        let kind = word(snapshot.kind);
        let mut line = format!("{} g{generation} {id}  {kind}", snapshot.sandbox);
        if let Some(label) = &snapshot.label {
            line.push_str(&format!(" \"{label}\""));
        }
        if let Some(size) = snapshot.size {
            line.push_str(&format!("  {}", bytes(size.own_bytes)));
        }
        line.push_str(&self.paint.dim(&format!("  {}", when::ago(created_at))));
        for sandbox in self.awake_from.get(&Some(id.as_str())).into_iter().flatten() {
            line.push_str(&format!("  ← {}", self.sandbox_line(sandbox)));
        }
        line
    }

    fn sandbox_line(&self, sandbox: &Sandbox) -> String {
        let name = match sandbox.name == self.asked {
            true => self.paint.bold(&sandbox.name),
            false => sandbox.name.clone(),
        };
        let mut said = state_colour(self.paint, &word(sandbox.state));
        if let Some(fate) = super::fork::fate(sandbox) {
            said.push_str(&format!(", {fate}"));
        }
        format!("{name} ({said})")
    }
}
