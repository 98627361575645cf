"""Round robin knows no difference; what is made out of it may."""

from coordinator.policies.round_robin import RoundRobin


def test_its_cost_is_asked_for_once():
    assert RoundRobin().constant


def test_a_policy_with_a_cost_of_its_own_is_asked_again():
    class Own(RoundRobin):
        def cost(self, load, instance, demand):
            return float(load.requests)

    class Renamed(RoundRobin):
        pass

    assert not Own().constant
    assert Renamed().constant
    assert RoundRobin().constant
