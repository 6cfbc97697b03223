use super::*;

fn look(created: u64, alone: bool) -> Option<FoundChanges> {
    let changes = Some(Changes { created, ..Changes::default() });
    let names = LayerNames::Here(Arc::default());
    Some(FoundChanges { changes, complete: true, alone, names, unsaved: None })
}

fn known() -> ChangeTracking {
    let tracking = ChangeTracking::default();
    tracking.begin_layer(&LayerId::fresh(), false);
    tracking
}

#[test]
fn a_command_alone_has_an_exact_record() {
    let (tracking, id) = (known(), CommandId::fresh());
    tracking.starts(&id);
    tracking.ends(&id);
    tracking.look_ends(look(3, true), Duration::ZERO);
    let record = tracking.result(&id).unwrap();
    assert_eq!((record.counts.created, record.counts.exact), (3, true));
    assert!(record.counts.complete && tracking.is_open(&id));
    tracking.recorded(&id);
    assert!(!tracking.is_open(&id));
}

#[test]
fn commands_that_overlap_share_what_was_found_and_say_so() {
    let (tracking, [long, short]) = (known(), [0; 2].map(|_| CommandId::fresh()));
    tracking.starts(&long);
    tracking.starts(&short);
    tracking.ends(&short);
    tracking.look_ends(look(2, false), Duration::ZERO);
    let record = tracking.result(&short).unwrap().counts;
    assert_eq!((record.created, record.exact), (2, false));
    assert_eq!(record.with, [long.to_string()]);
    tracking.ends(&long);
    tracking.look_ends(look(5, true), Duration::ZERO);
    let record = tracking.result(&long).unwrap().counts;
    assert_eq!((record.created, record.exact), (7, false));
}

#[test]
fn what_a_command_left_behind_makes_the_next_record_inexact() {
    let (tracking, [one, two, three]) = (known(), [0; 3].map(|_| CommandId::fresh()));
    tracking.starts(&one);
    tracking.ends(&one);
    tracking.look_ends(look(1, false), Duration::ZERO);
    assert!(!tracking.result(&one).unwrap().counts.exact);
    tracking.starts(&two);
    tracking.ends(&two);
    tracking.look_ends(look(1, true), Duration::ZERO);
    assert!(!tracking.result(&two).unwrap().counts.exact);
    tracking.starts(&three);
    tracking.ends(&three);
    tracking.look_ends(look(1, true), Duration::ZERO);
    assert!(tracking.result(&three).unwrap().counts.exact, "it is gone");
}

#[test]
fn without_an_index_nothing_is_claimed() {
    let (tracking, id) = (ChangeTracking::default(), CommandId::fresh());
    tracking.adopted(&id);
    tracking.ends(&id);
    let unknown = look(9, true).map(|found| FoundChanges { changes: None, ..found });
    tracking.look_ends(unknown, Duration::ZERO);
    let record = tracking.result(&id).unwrap().counts;
    assert_eq!((record.created, record.exact, record.complete), (0, false, false));
    let next = CommandId::fresh();
    tracking.starts(&next);
    tracking.ends(&next);
    tracking.look_ends(look(4, true), Duration::ZERO);
    assert_eq!(tracking.result(&next).unwrap().counts.created, 4);
}

#[tokio::test]
async fn whoever_waits_for_a_look_that_never_comes_can_give_up() {
    let (tracking, [long, gone]) = (known(), [0; 2].map(|_| CommandId::fresh()));
    tracking.starts(&long);
    tracking.look_ends(look(2, true), Duration::ZERO);
    tracking.ends(&long);
    let waits = tokio::time::timeout(Duration::from_millis(10), tracking.known(&long)).await;
    assert!(waits.is_err(), "no look has ended since");
    let record = tracking.give_up(&long).unwrap().counts;
    assert_eq!((record.created, record.exact, record.complete), (2, false, false));
    assert_eq!(tracking.known(&long).await, None);
    assert_eq!(tracking.known(&gone).await, None, "of a command that was never here");
}

#[test]
fn a_layer_that_begins_during_a_look_begins_empty() {
    let (tracking, id) = (known(), CommandId::fresh());
    let old = tracking.state.lock().layer.clone().unwrap();
    tracking.starts(&id);
    tracking.ends(&id);
    tracking.look_begins(&old);
    let fresh = LayerId::fresh();
    tracking.begin_layer(&fresh, false);
    let found = look(3, true).map(|found| FoundChanges { names: LayerNames::Unknown, ..found });
    tracking.look_ends(found, Duration::ZERO);
    assert_eq!(tracking.result(&id).unwrap().counts.created, 3);
    assert!(matches!(tracking.look_begins(&fresh), LayerNames::Here(index) if index.names() == 0));
}

#[test]
fn long_looks_are_followed_by_rests() {
    let tracking = known();
    tracking.look_ends(look(0, true), Duration::from_millis(1));
    assert_eq!(tracking.rest(), Duration::ZERO);
    tracking.look_ends(look(0, true), Duration::from_secs(1));
    assert!(tracking.rest() > Duration::from_secs(3));
}

#[test]
fn a_command_that_ends_during_a_look_is_finished_by_the_next() {
    let (tracking, [first, late]) = (known(), [0; 2].map(|_| CommandId::fresh()));
    tracking.begin_session(SessionChanges::default());
    let layer = tracking.state.lock().layer.clone().unwrap();
    tracking.starts(&first);
    tracking.starts(&late);
    tracking.ends(&first);
    tracking.look_begins(&layer);
    tracking.ends(&late);
    tracking.look_ends(look(1, false), Duration::ZERO);
    assert!(tracking.result(&first).is_some() && tracking.result(&late).is_none());
    assert!(tracking.wants_look() && tracking.may_have_more());
    tracking.look_begins(&layer);
    tracking.look_ends(look(2, true), Duration::ZERO);
    assert_eq!(tracking.result(&late).unwrap().counts.created, 3);
    // Overlapping commands count once in the session.
    let session = tracking.whole_session().unwrap();
    assert_eq!((session.created, session.complete), (3, true));
}

#[test]
fn a_layer_that_is_left_is_looked_at_for_those_who_were_there() {
    let (tracking, [old, new]) = (known(), [0; 2].map(|_| CommandId::fresh()));
    tracking.begin_session(SessionChanges::default());
    let left = tracking.state.lock().layer.clone().unwrap();
    tracking.starts(&old);
    tracking.ends(&old);
    let chain = [LayerId::fresh()];
    tracking.leave_layer(&chain);
    let fresh = LayerId::fresh();
    tracking.begin_layer(&fresh, false);
    assert!(tracking.wants_look());
    tracking.starts(&new);
    let earlier = tracking.next_earlier().unwrap();
    assert_eq!((&earlier.layer, &earlier.chain[..]), (&left, &chain[..]));
    tracking.earlier_looked(&earlier, look(5, true).as_ref());
    let record = tracking.result(&old).unwrap().counts;
    assert_eq!((record.created, record.exact, record.complete), (5, true, true));
    tracking.ends(&new);
    tracking.look_begins(&fresh);
    tracking.look_ends(look(1, true), Duration::ZERO);
    let record = tracking.result(&new).unwrap().counts;
    assert_eq!((record.created, record.exact), (1, true));
    let session = tracking.whole_session().unwrap();
    assert_eq!((session.created, session.complete), (6, true));

    // What a look under way cannot have seen is seen by the next.
    let late = CommandId::fresh();
    tracking.starts(&late);
    tracking.look_begins(&fresh);
    tracking.ends(&late);
    tracking.leave_layer(&chain);
    tracking.begin_layer(&LayerId::fresh(), false);
    tracking.look_ends(look(2, true), Duration::ZERO);
    let earlier = tracking.next_earlier().unwrap();
    assert!(earlier.layer == fresh && earlier.names.are_known());
    tracking.earlier_looked(&earlier, look(1, true).as_ref());
    let record = tracking.result(&late).unwrap().counts;
    assert_eq!((record.created, record.complete), (3, true));

    // A layer that cannot be looked at leaves records that are marked so.
    let lost = CommandId::fresh();
    tracking.starts(&lost);
    tracking.ends(&lost);
    tracking.leave_layer(&chain);
    tracking.begin_layer(&LayerId::fresh(), false);
    let earlier = tracking.next_earlier().unwrap();
    tracking.earlier_looked(&earlier, None);
    tracking.look_ends(look(0, true), Duration::ZERO);
    let record = tracking.result(&lost).unwrap().counts;
    assert_eq!((record.exact, record.complete), (false, false));
    assert!(!tracking.session().unwrap().complete);
}
