use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::{Holder, LayerSize, ReferenceCounts, Sizes, SnapshotChain, Totals};
use crate::model::{LayerId, MemoryId, SnapshotId, Template};
use crate::store::Linked;

fn size(bytes: u64) -> LayerSize {
    LayerSize { bytes, foreign: 0, image: false, linked: Vec::new() }
}

fn enter(
    counts: &mut ReferenceCounts,
    parent: Option<&SnapshotId>,
    layers: &[&LayerId],
) -> SnapshotId {
    let id = SnapshotId::fresh();
    let layers: Vec<LayerId> = layers.iter().map(|id| (*id).clone()).collect();
    counts.layers.hold(Holder::Snapshot(id.clone()), &layers);
    let chain = SnapshotChain { parent: parent.cloned(), layers, ..SnapshotChain::default() };
    counts.chains.insert(id.clone(), chain);
    id
}

#[test]
fn a_chain_with_a_fork() {
    let [image, a, b, c] = [0; 4].map(|_| LayerId::fresh());
    let layer_sizes = HashMap::from([
        (image.clone(), LayerSize { image: true, ..size(1000) }),
        (a.clone(), size(100)),
        (b.clone(), size(20)),
        (c.clone(), size(3)),
    ]);
    let mut counts = ReferenceCounts::new(layer_sizes);
    counts.layers.hold(Holder::Image("i".to_owned()), [&image]);
    let first = enter(&mut counts, None, &[&a, &image]);
    let second = enter(&mut counts, Some(&first), &[&b, &a, &image]);
    let fork = enter(&mut counts, Some(&first), &[&c, &a, &image]);
    let sizes = |id| counts.sizes(id).expect("entered");
    assert_eq!(sizes(&first), Sizes { own: 100, shared: 1000, freed: 0 });
    assert_eq!(sizes(&second), Sizes { own: 20, shared: 1100, freed: 20 });
    assert_eq!(sizes(&fork), Sizes { own: 3, shared: 1100, freed: 3 });
    let totals = Totals { bytes: 1123, images: 1000, ..Totals::default() };
    assert_eq!(counts.totals(), totals);
    assert_eq!(counts.sizes(&SnapshotId::fresh()), None);
}

#[test]
fn memory_counts_like_layers() {
    let [template, pause, fork] = [0; 3].map(|_| MemoryId::fresh());
    let layer = LayerId::fresh();
    let mut counts = ReferenceCounts::new(HashMap::from([(layer.clone(), size(7))]));
    for (id, bytes) in [(&template, 1000), (&pause, 100), (&fork, 20)] {
        counts.memory_sizes.insert(id.clone(), bytes);
    }
    assert_eq!(counts.totals().unheld, 1127);
    let on_record = Template {
        format: crate::model::FORMAT,
        key: "k".to_owned(),
        memory: template.clone(),
        used_at: crate::model::now(),
    };
    counts.hold_template(&on_record);
    let mut enter_both = |parent: Option<&SnapshotId>, memory: &[&MemoryId]| {
        let id = enter(&mut counts, parent, &[&layer]);
        let memory: Vec<MemoryId> = memory.iter().map(|id| (*id).clone()).collect();
        counts.memory.hold(Holder::Snapshot(id.clone()), &memory);
        counts.chains.entry(id.clone()).or_default().memory = memory;
        id
    };
    let first = enter_both(None, &[&pause, &template]);
    let second = enter_both(Some(&first), &[&fork, &pause, &template]);
    let sizes = |counts: &ReferenceCounts, id| counts.sizes(id).expect("entered");
    assert_eq!(sizes(&counts, &first), Sizes { own: 107, shared: 1000, freed: 0 });
    assert_eq!(sizes(&counts, &second), Sizes { own: 20, shared: 1107, freed: 20 });
    let totals = Totals { bytes: 7, memory: 1120, ..Totals::default() };
    assert_eq!(counts.totals(), totals);
    counts.drop_snapshot(&second);
    assert_eq!(sizes(&counts, &first), Sizes { own: 107, shared: 1000, freed: 107 });
    assert_eq!(counts.held_memory(), HashSet::from([template.clone(), pause.clone()]));
    assert_eq!(counts.totals().unheld, 20);
    counts.remove_memory(std::slice::from_ref(&fork));
    assert_eq!(counts.totals().unheld, 0);
    counts.hold_templates(&[]);
    assert_eq!(sizes(&counts, &first), Sizes { own: 1107, shared: 0, freed: 1107 });
}

#[test]
fn links_count_once_and_are_freed_last() {
    let [a, b, both] = [0; 3].map(|_| LayerId::fresh());
    let linked = vec![
        Linked { bytes: 90, layers: vec![a.clone()] },
        Linked { bytes: 15, layers: vec![b.clone()] },
    ];
    let layer_sizes = HashMap::from([
        (a.clone(), size(100)),
        (b.clone(), size(20)),
        (both.clone(), LayerSize { linked, ..size(110) }),
    ]);
    let mut counts = ReferenceCounts::new(layer_sizes.clone());
    let old = enter(&mut counts, None, &[&b, &a]);
    let new = enter(&mut counts, None, &[&both]);
    assert_eq!(counts.totals().bytes, 100 + 20 + 5);
    assert_eq!(counts.sizes(&old).expect("entered").freed, 10 + 5);
    assert_eq!(counts.sizes(&new).expect("entered").freed, 5);

    let mut after = layer_sizes;
    after.remove(&a);
    after.remove(&b);
    let mut counts = ReferenceCounts::new(after);
    let new = enter(&mut counts, None, &[&both]);
    assert_eq!(counts.sizes(&new).expect("entered").freed, 110);
}

proptest! {
    /// Deleting snapshots one after the other, in any order, frees in the end all they took, and
    /// each time what was promised.
    #[test]
    fn what_is_promised_is_freed(
        bytes in prop::collection::vec(0u64..1000, 1..8),
        chains in prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..6), 1..6),
    ) {
        let layers: Vec<LayerId> = bytes.iter().map(|_| LayerId::fresh()).collect();
        let mut layer_sizes: HashMap<LayerId, LayerSize> =
            layers.iter().cloned().zip(bytes.iter().map(|bytes| size(*bytes))).collect();
        let mut chains: Vec<Vec<&LayerId>> = chains
            .iter()
            .map(|chain| chain.iter().map(|index| index.get(&layers)).collect())
            .collect();
        while !chains.is_empty() {
            let mut counts = ReferenceCounts::new(layer_sizes.clone());
            let ids: Vec<SnapshotId> =
                chains.iter().map(|chain| enter(&mut counts, None, chain)).collect();
            let before = counts.totals();
            let promised = counts.sizes(&ids[0]).expect("entered").freed;
            chains.remove(0);
            let held: HashSet<&LayerId> = chains.iter().flatten().copied().collect();
            let mut after = ReferenceCounts::new(layer_sizes.clone());
            for chain in &chains {
                enter(&mut after, None, chain);
            }
            prop_assert_eq!(after.totals().unheld, before.unheld + promised);
            layer_sizes.retain(|id, _| held.contains(id));
        }
        prop_assert_eq!(ReferenceCounts::new(layer_sizes).totals().bytes, 0);
    }
}
