import sys, torch, tally.torch as t
t.init()
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64,64),torch.nn.ReLU(),torch.nn.Linear(64,32),torch.nn.ReLU(),torch.nn.Linear(32,10))
def run(cross, steps=20):
    m=make(); o=t.DistributedOptimizer(torch.optim.Adam(m.parameters(),lr=torch.tensor(0.01)), m.named_parameters(), cross_barrier=cross)
    s=torch.optim.lr_scheduler.StepLR(o,3,0.7)
    g=torch.Generator().manual_seed(t.rank())
    from tally.torch import gates
    n=0
    for i in range(steps):
        x=torch.randn(8,64,generator=g)
        o.zero_grad(set_to_none=i%2==0)
        m(x).pow(2).mean().backward()
        o.step(); s.step(); n+=len(gates.due)
    if cross: print("due behind step:", n)
    return [p.detach().clone() for p in m.parameters()]
a=run(False); b=run(True)
print(all(torch.equal(x,y) for x,y in zip(a,b)))
