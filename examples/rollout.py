"""Learn how to throw: differentiate a long physics roll-out, step by step, in little memory.

python examples/rollout.py

A chain of masses on springs swings for a thousand small steps (symplectic Euler, a fixed-step solver as the
cell). The push at the start and the stiffness of the springs are learnt, so that the last mass ends where it
should. Keeping every step would take memory for all of them; the scan keeps a few, and recomputes the
rest.
"""

import torch

import lowtide

MASSES, STEPS, SECONDS = 64, 1000, 10.0
TARGET = 0.5


def main() -> None:
    torch.manual_seed(0)
    push = torch.zeros(MASSES, requires_grad=True)
    stiffness = torch.tensor(4.0, requires_grad=True)
    dt = SECONDS / STEPS

    def swing(state, _):
        place, speed = state
        stretch = torch.diff(place, prepend=torch.zeros(1))
        force = stiffness * torch.diff(stretch, append=torch.zeros(1)) - 0.1 * place**3
        speed = speed + dt * force
        place = place + dt * speed
        return (place, speed), None

    optimizer = torch.optim.Adam([push, stiffness], lr=0.05)
    plan = lowtide.scan_plan(swing, (torch.zeros(MASSES), push), length=STEPS, budget="3%")
    print(plan)
    for step in range(4):
        (place, _), _ = lowtide.scan(swing, (torch.zeros(MASSES), push), length=STEPS, budget="3%")
        loss = (place[-1] - TARGET).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: the last mass is at {place[-1].item():+.3f}, the target is {TARGET:+.3f}")


if __name__ == "__main__":
    main()
