"""Which member holds which id, key and place: bookkeeping without tasks and times."""

from coordinator.core.instance import Address, Instance, Role

from .member import Member

Key = tuple[str, Role, Address]
Place = tuple[Role, Address]


class Roster:
    """The members of a cluster.

    An id belongs to one member; when a new one takes the id of one that is leaving, the old one stays aside until no
    request needs it. A place (role and address) belongs to its latest holder until that one's links are closed.

    Attributes:
        current: by id, in the order in which ids became known.
        former: leaving members whose id has a new holder.
    """

    def __init__(self) -> None:
        self.current: dict[str, Member] = {}
        self.former: list[Member] = []
        self._by_key: dict[Key, Member] = {}
        self._places: dict[Place, Member] = {}

    def all(self) -> list[Member]:
        """Every member, the present holders of ids first."""
        return [*self.current.values(), *self.former]

    def of(self, source: str) -> list[Member]:
        """Members that this source named and that are not leaving."""
        return [m for m in self.current.values() if m.source == source and not m.leaving]

    def holder(self, instance: Instance) -> Member | None:
        """The member under this key."""
        return self.under(instance.key)

    def under(self, key: Key) -> Member | None:
        """The member under a key."""
        return self._by_key.get(key)

    def holders(self, instance: Instance) -> list[Member]:
        """All members under this key: more than one if only the engine protocol differs."""
        return [m for m in (self.holder(instance), *self.former) if m is not None and m.instance.key == instance.key]

    def claimants(self, ident: str, place: Place | None) -> list[Member]:
        """Members that hold this id or this place, the leaving ones aside."""
        found = {self.current.get(ident), self._places.get(place) if place is not None else None}
        return [m for m in found if m is not None and not m.leaving]

    def admit(self, instance: Instance) -> Member | None:
        """Whom a new member has to follow at its place, if anybody; raises ValueError if id or place is taken."""
        old = self.current.get(instance.id)
        if old is not None and not old.leaving:
            raise ValueError(f"an instance with the id {instance.id!r} is there already, at {old.instance.url}")
        before = self._places.get((instance.role, instance.address))
        if before is not None and not before.leaving:
            raise ValueError(
                f"the {instance.role} instance at {instance.url} is there already, as {before.instance.id!r}"
            )
        return before

    def enter(self, member: Member) -> None:
        """Make it the holder of its id, key and place."""
        instance = member.instance
        old = self.current.get(instance.id)
        if old is not None:
            self.former.append(old)
        self.current[instance.id] = member
        self._by_key[instance.key] = member
        self._places[instance.role, instance.address] = member

    def part(self, member: Member) -> None:
        """Take its id and key away; its place is free only when its links are closed."""
        instance = member.instance
        if self.current.get(instance.id) is member:
            del self.current[instance.id]
        else:
            self.former.remove(member)
        if self._by_key.get(instance.key) is member:
            del self._by_key[instance.key]

    def vacate(self, member: Member) -> None:
        """Its links are closed: free its place, unless a successor has it."""
        place = (member.instance.role, member.instance.address)
        if self._places.get(place) is member:
            del self._places[place]
