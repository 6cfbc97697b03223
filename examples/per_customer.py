"""A sandbox for each customer of a service: created on first use, found by tags, asleep when nobody needs it."""

from sandkeep import Sandbox, Sandkeep

client = Sandkeep()


def sandbox_of(customer: str) -> Sandbox:
    """The customer's sandbox. A call that needs it wakes it, with all files as they were."""
    return client.get_or_create(
        f"customer-{customer}",
        tags={"service": "notes", "customer": customer},
        owner=customer,
        network={"mode": "deny-all"},
        memory="1G",
        idle_timeout="10m",
        keep_last=3,
    )


def handle(customer: str, note: str) -> str:
    """A request of a customer."""
    box = sandbox_of(customer)
    return box.run("cat >> notes; wc -l < notes", input=note + "\n", check=True).stdout.strip()


def main() -> None:
    for customer, note in [("acme", "one"), ("globex", "other"), ("acme", "two")]:
        print(f"{customer} has {handle(customer, note)} notes")
    # What the operator sees of all of them, without waking one.
    for box in client.sandboxes(tags={"service": "notes"}):
        box.stop()
        info = box.refresh()
        print(f"{info.owner}: {info.state}, generation {info.generation}")
    print(f"acme has {handle('acme', 'three')} notes")
    for box in client.sandboxes(tags={"service": "notes"}):
        box.delete()


if __name__ == "__main__":
    main()
